"""Real tokens a second of a run: foretune beside a bare loop and TRL's SFTTrainer, each in its own process, in turn.

    python benchmarks/training.py MODEL_FOLDER [--rounds N] [--trl PYTHON] [--packing] [--layers N]

Counted are tokens of rows without padding, from the end of the first update to the end of the last: no loading, no
saving. Everything is LoRA in fp32 on the CPU. Without `--packing` rows are padded, one micro batch an update; with it
rows of 100 tokens in the mean are packed to 1,024, and TRL runs padded (its default) and packed. TRL is called in a
Python that has it (`--trl`). Ratios are of medians over the rounds of one run. With `--packing` activations are
recomputed, as both tools do by default: kept ones of 8 x 1,024 tokens need 24 GiB. `--layers` takes the model's shape
with so many layers, untrained.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

TEXT = (
    "the answer of a model is learnt from rows that people write with names numbers such as three or seven and "
    "questions lists code exclamations now then"
)
WORDS = TEXT.split()
RANK, RATE, SEED = 8, 1e-4, 0


def write_rows(path: Path, num_rows: int, median_words: int, spread: float) -> None:
    """Conversations whose lengths are lognormal: many short ones, a few long ones. A word is about a token."""
    draw = random.Random(SEED)
    with path.open("w") as file:
        for _ in range(num_rows):
            size = min(650, max(4, int(draw.lognormvariate(0, spread) * median_words)))
            question = " ".join(draw.choices(WORDS, k=max(2, size // 3)))
            answer = " ".join(draw.choices(WORDS, k=size))
            row = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": row}) + "\n")


class Case:
    """What is run."""

    def __init__(self, folder: Path, *, is_packing: bool) -> None:
        self.folder, self.is_packing = folder, is_packing
        self.rows = folder / "rows.jsonl"
        self.micro_batch = 8 if is_packing else 2
        self.length = 1024
        if is_packing:
            write_rows(self.rows, 600, 25, 1.2)
        else:
            write_rows(self.rows, 64, 60, 0.5)

    def updates(self, *, packs: bool) -> int:
        """A packed micro batch holds as many tokens as many padded ones."""
        return 3 if packs else 12


def ours(model: str, case: Case, output: Path, *, packs: bool) -> float:
    from foretune.api import build_config, train

    config = build_config(
        {
            "model.id": model,
            "device": "cpu",
            "precision.dtype": "fp32",
            "lora.rank": RANK,
            "optimizer.learning_rate": RATE,
            "schedule.updates": case.updates(packs=packs),
            "batch.micro_batch_size": case.micro_batch,
            "batch.sequence_length": case.length,
            "batch.packing": packs,
            "data.train": str(case.rows),
            "gradient_checkpointing": case.is_packing,
            "output": str(output),
        }
    ).config
    tokens, first, last = 0, 0.0, 0.0
    for event in train(config):
        if type(event).__name__ == "UpdateDone":
            last = time.perf_counter()
            if event.update == 1:
                first = last
            else:
                tokens += event.num_tokens
    return tokens / (last - first)


def bare(model: str, case: Case, output: Path) -> float:
    """The same micro batches through a loop of ten lines."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from foretune.api import build_config
    from foretune.api.rows import row_preparation
    from foretune.data import open_store
    from foretune.runtime.feed import Feed, Rows, on_device
    from foretune.runtime.preparation import prepare_rows

    fields = {
        "model.id": model,
        "precision.dtype": "fp32",
        "device": "cpu",
        "batch.micro_batch_size": case.micro_batch,
        "batch.sequence_length": case.length,
    }
    config = build_config(fields).config
    *_, found = prepare_rows(row_preparation(config, str(case.rows), limit=case.length, cache=output))
    feed = Feed(Rows(open_store(found.place), found.row_lengths), config, 0)
    host = [feed.batch(rows) for rows in list(feed.plan(0))[: case.updates(packs=False)]]
    batches = [on_device(each, torch.device("cpu"), config.batch) for each in host]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    net = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM")).train()
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)
    first = 0.0
    for number, batch in enumerate(batches):
        logits = net(input_ids=batch.input_ids_BS, use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), batch.targets_BS.view(-1))
        loss.backward()
        loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number == 0:
            first = time.perf_counter()
    return sum(each.num_tokens for each in host[1:]) / (time.perf_counter() - first)


TRL = """
import json, sys, time
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
import torch

model, rows, out, packing, micro_batch, length, updates, rank, rate, recompute = sys.argv[1:]
ends, tokens = [], []

class Clock(TrainerCallback):
    def on_step_end(self, *_, **__):
        ends.append(time.perf_counter())

names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
args = SFTConfig(
    output_dir=out, max_length=int(length), packing=packing == "yes", per_device_train_batch_size=int(micro_batch),
    max_steps=int(updates), learning_rate=float(rate), lr_scheduler_type="cosine", max_grad_norm=1.0, bf16=False,
    use_cpu=True, report_to=[], save_strategy="no", gradient_checkpointing=recompute == "yes",
    logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False,
)
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), args=args,
    train_dataset=load_dataset("json", data_files=rows, split="train", cache_dir=out),
    processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Clock()],
    peft_config=LoraConfig(r=int(rank), lora_alpha=32, target_modules=names, task_type="CAUSAL_LM"),
)
collate = trainer.data_collator

def counted(examples):
    batch = collate(examples)
    mask = batch.get("attention_mask")
    tokens.append(int(mask.sum()) if mask is not None else int(batch["input_ids"].numel()))
    return batch

trainer.data_collator = counted
trainer.train()
print("RATE", sum(tokens[1:int(updates)]) / (ends[-1] - ends[0]))
"""


def theirs(python: str, model: str, case: Case, output: Path, *, packs: bool) -> float:
    words = [case.micro_batch, case.length, case.updates(packs=packs), RANK, RATE, "yes" if case.is_packing else "no"]
    ended = subprocess.run(
        [python, "-c", TRL, model, str(case.rows), str(output), "yes" if packs else "no", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    rates = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("RATE")]
    if not rates:
        sys.exit(f"TRL failed:\n{ended.stderr[-2000:]}")
    return float(rates[0])


def shortened(model: str, num_layers: int, folder: Path) -> str:
    """Make a model of the same widths with fewer layers, beside the tokenizer."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, num_hidden_layers=num_layers)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(model) / name, folder / name)
    return str(folder)


def in_child(kind: str, model: str, case: Case, output: Path) -> float:
    """Run one measurement in a process of its own."""
    given = json.dumps({"kind": kind, "model": model, "folder": str(case.folder), "output": str(output)})
    ended = subprocess.run([sys.executable, __file__, "--child", given], capture_output=True, text=True, check=False)
    rates = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("RATE")]
    if not rates:
        sys.exit(f"{kind} failed:\n{ended.stderr[-2000:]}")
    return float(rates[0])


def child(given: dict[str, Any]) -> None:
    is_packing = given["kind"] in ("packed", "padded")
    case = Case(Path(given["folder"]), is_packing=is_packing)
    output = Path(given["output"])
    if given["kind"] == "bare":
        rate = bare(given["model"], case, output)
    else:
        rate = ours(given["model"], case, output, packs=given["kind"] == "packed")
    print("RATE", rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl", metavar="PYTHON")
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--layers", type=int, metavar="N")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(json.loads(given.child))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        case = Case(folder, is_packing=given.packing)
        if given.layers:
            given.model = shortened(given.model, given.layers, folder / "short")
        kinds = ["packed", "padded"] if given.packing else ["ours", "bare"]
        rates: dict[str, list[float]] = {}
        for number in range(given.rounds):
            for kind in kinds:
                rates.setdefault(kind, []).append(in_child(kind, given.model, case, folder / f"{kind}{number}"))
            if given.trl:
                for packs in (True, False) if given.packing else (False,):
                    name = f"TRL {'packed' if packs else 'padded'}"
                    output = folder / f"trl{number}{packs}"
                    rates.setdefault(name, []).append(theirs(given.trl, given.model, case, output, packs=packs))
            print({name: round(values[-1], 1) for name, values in rates.items()}, flush=True)
        own = median(rates[kinds[0]])
        for name, values in rates.items():
            print(f"{name}: {median(values):,.1f} tokens/s; {kinds[0]} / {name} = {own / median(values):.3f}")


if __name__ == "__main__":
    main()
