"""Rows a second, from a file of conversations to ids and labels: foretune beside TRL, and memory on a large file.

    python benchmarks/rows.py TOKENIZER_FOLDER [--rows N] [--trl PYTHON] [--large MIB]

TRL is called in a Python that has it (`--trl`), through the preparation of its SFTTrainer with assistant masks, without
a model. Its clock starts when everything is imported; ours counts the start of our processes. Both write what they
made: TRL its Arrow cache, foretune its store. Ratios are to TRL with as many processes in the same run.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from foretune.api import DataAnswer, build_config, check_data

TEXT = (
    "the answer of a model is learnt from rows that people write, with names, numbers such as 3,141 or 27 %, code like "
    "`for x in range(10): print(x)`, questions? exclamations! lists; and, now and then, Ümläute, 你好 or 😀"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"

TRL = """
import json, sys, time
from types import SimpleNamespace
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

file, folder, template, processes, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
args = SFTConfig(
    output_dir=out, assistant_only_loss=True, dataset_num_proc=int(processes) if int(processes) > 1 else None,
    max_length=None, use_cpu=True, report_to=[], bf16=False,
)
start = time.perf_counter()
rows = load_dataset("json", data_files=file, split="train", cache_dir=out)
stub = SimpleNamespace(_tokenizer=tokenizer, chat_template=template, completion_only_loss=False)
made = SFTTrainer._prepare_dataset(stub, rows, tokenizer, args, False, None, "train")
seconds = time.perf_counter() - start
tokens = sum(len(row) for row in made["input_ids"])
learnt = sum(label >= 0 for row in made["labels"] for label in row)
print(json.dumps({"seconds": seconds, "rows": len(made), "tokens": tokens, "answers": learnt}))
"""


def write_rows(file: Path, *, num_rows: int | None = None, num_bytes: int = 0) -> int:
    """Write conversations of one to four exchanges; return how many."""
    rng, written, words = random.Random(7), 0, TEXT.split()

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(low, high)))

    with file.open("w", encoding="utf-8") as stream:
        while written < num_rows if num_rows is not None else stream.tell() < num_bytes:
            messages = []
            for _ in range(rng.randint(1, 4)):
                messages.append({"role": "user", "content": text(5, 40)})
                messages.append({"role": "assistant", "content": text(10, 80)})
            stream.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
            written += 1
    return written


def ours(file: Path, folder: str, template: str, processes: int) -> tuple[float, DataAnswer]:
    settings = {"model.id": folder, "data.train": str(file), "data.supervision": "assistant_only"}
    start = time.perf_counter()
    items = check_data(build_config(settings).config, chat_template=template, num_rows=0, workers=processes)
    *_, answer = items
    assert isinstance(answer, DataAnswer)
    return time.perf_counter() - start, answer


def theirs(python: str, file: Path, folder: str, processes: int, out: Path) -> dict[str, float]:
    command = [python, "-c", TRL, str(file), folder, TAGGED, str(processes), str(out)]
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "HF_HOME": str(out)}
    )
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def compare(given: argparse.Namespace, place: Path) -> None:
    file = place / "rows.jsonl"
    write_rows(file, num_rows=given.rows)
    print(f"{given.rows:,} conversations, {file.stat().st_size / 2**20:.0f} MiB; the best of {given.repeats}")
    for processes in (1, 2):
        base = None
        if given.trl:
            found = [
                theirs(given.trl, file, given.folder, processes, place / f"trl{processes}{k}")
                for k in range(given.repeats)
            ]
            base = given.rows / min(each["seconds"] for each in found)
            learnt = f"{found[0]['answers']:,} answer tokens"
            print(f"{processes} processes  TRL, tagged template        {base:8,.0f} rows/s  {learnt}")
        for name, template in (("marked rendering", PLAIN), ("tagged template", TAGGED)):
            seconds, answers = [], 0
            for repeat in range(given.repeats):
                os.environ["FORETUNE_CACHE"] = str(place / f"{name}{processes}{repeat}")
                took, answer = ours(file, given.folder, template, processes)
                seconds.append(took)
                answers = answer.stats.num_answer_tokens
            rate = given.rows / min(seconds)
            ratio = f", {rate / base:.2f} of TRL" if base else ""
            print(f"{processes} processes  foretune, {name:16}  {rate:8,.0f} rows/s  {answers:,} answer tokens{ratio}")


class Sampler(threading.Thread):
    """Looks ten times a second at how much memory this process and its children hold (Linux)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.1):
            processes = ["self"]
            for thread in Path("/proc/self/task").iterdir():
                with suppress(OSError):
                    processes += (thread / "children").read_text().split()
            self.peak_bytes = max(self.peak_bytes, sum(map(held_bytes, processes)))


def held_bytes(process: str) -> int:
    """Return what a process holds, its part of shared pages (PSS)."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def measure_memory(given: argparse.Namespace, place: Path) -> None:
    file = place / "large.jsonl"
    num_rows = write_rows(file, num_bytes=given.large << 20)
    os.environ["FORETUNE_CACHE"] = str(place / "large")
    sampler = Sampler()
    sampler.start()
    seconds, _ = ours(file, given.folder, PLAIN, given.processes)
    sampler.is_over.set()
    own, child = (resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(
        f"{given.large:,} MiB, {num_rows:,} rows in {seconds:.0f} s, {given.processes} encoders: at most {own:.0f} MiB "
        f"here, {child:.0f} MiB in an encoder, {sampler.peak_bytes / 2**20:.0f} MiB in all at once (PSS)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--trl", metavar="PYTHON")
    parser.add_argument("--large", type=int, metavar="MIB")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        compare(given, Path(place))
        if given.large:
            measure_memory(given, Path(place))


if __name__ == "__main__":
    sys.exit(main())
