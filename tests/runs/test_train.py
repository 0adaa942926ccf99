"""A tiny model is trained, saved and loaded again; what it learns is what the stock Trainer would make it learn."""

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs.made_run import configured as configured_run
from runs.made_run import conversation, instruction, model_folder, settings, write_rows

from foretune.api import EvaluationAnswer, evaluate, plan_training, train
from foretune.contract import TrainingConfig
from foretune.errors import ConfigError, RunDirectoryError, UnsupportedError
from foretune.evidence import RunRecord, read_record
from foretune.runtime.run_events import RunFinished, UpdateDone
from foretune.runtime.schedule import learning_rate_factor, run_length


def configured(folder: Path, **changes: Any) -> TrainingConfig:
    return configured_run(folder, **changes).config


def run(config: TrainingConfig, **options: Any) -> list[Any]:
    return list(train(config, **options))


def losses_of(events: list[Any]) -> list[float]:
    return [event.loss for event in events if isinstance(event, UpdateDone)]


def evaluated(folder: Path, **options: Any) -> EvaluationAnswer:
    *_, answer = evaluate(str(folder / "run"), **options)
    assert isinstance(answer, EvaluationAnswer)
    return answer


METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"lora": None},
    "lora, SGD, chunked loss, eager, no checkpointing": {
        "optimizer__name": "sgd",
        "optimizer__learning_rate": 0.5,
        "loss": "chunked",
        "attention": "eager",
        "gradient_checkpointing": False,
    },
    "DoRA with a module trained whole": {"lora.use_dora": True, "lora.modules_to_save": ["lm_head"]},
}


def test_a_run_of_more_than_a_thousand_updates_ends_as_a_short_one(tmp_path: Path) -> None:
    changes = {"schedule__epochs": ..., "schedule__updates": 1100, "batch__micro_batch_size": 1}
    kept = {"checkpoint__every_updates": 550, "gradient_checkpointing": False, "lora.targets": ["q_proj"]}
    finished = run(configured(tmp_path, **changes, **kept, **{"lora.rank": 1}))[-1]
    assert isinstance(finished, RunFinished)
    assert all(check.holds for check in finished.record.checks)
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    assert int(checkpoint.name.rpartition("-")[2]) == 1100
    assert evaluated(tmp_path).record.probe.is_bitwise_equal


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_falls_and_the_artifact_reloads_bit_by_bit(method: str, tmp_path: Path) -> None:
    config = configured(tmp_path, schedule__epochs=6.0, **METHODS[method])
    events = run(config)
    losses = losses_of(events)
    assert len(losses) == 36
    assert sum(losses[-6:]) < 0.99 * sum(losses[:6])
    finished = events[-1]
    assert isinstance(finished, RunFinished)
    assert finished.record.outcome == "success"
    assert all(check.holds for check in finished.record.checks)
    probe = evaluated(tmp_path).record.probe
    assert probe is not None
    assert probe.is_bitwise_equal
    assert probe.max_abs_difference == 0.0


def test_the_held_out_loss_of_the_run_is_that_of_its_reloaded_artifact(tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held.jsonl", [conversation(number) for number in range(20, 26)])
    finished = run(configured(tmp_path, evaluation__data=str(held_out)))[-1]
    answer = evaluated(tmp_path, data=str(held_out))
    assert answer.loss == finished.record.evaluations[-1].loss


# -- against Transformers


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize(
    "shape", ["linear", *(pytest.param(shape, marks=pytest.mark.full) for shape in ("cosine", "constant"))]
)
def test_the_losses_are_the_stock_trainers(method: str, shape: str, tmp_path: Path) -> None:
    """With accumulation, an incomplete last group, warm-up and clipping, on the batches of our own order."""
    extra: dict[str, Any] = {"lora": None} if method == "full" else {}
    config = configured(
        tmp_path,
        num_rows=10,
        batch__accumulation_steps=2,
        schedule__epochs=3.0,
        schedule__shape=shape,
        schedule__warmup_updates=2,
        optimizer__max_grad_norm=0.3,
        **extra,
    )
    assert losses_of(run(config)) == pytest.approx(stock_losses(config, tmp_path), rel=2e-5)


def stock_losses(config: TrainingConfig, folder: Path) -> list[float]:
    """Train the same rows in the same order by Transformers' Trainer, and return the loss of each update."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    rows = batches_of(config, folder)
    model: Any = AutoModelForCausalLM.from_pretrained(config.model.id, dtype=torch.float32)
    if config.lora is not None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(config.seed)
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks Transformers by a name that it deprecates
            model = get_peft_model(
                model, LoraConfig(r=config.lora.rank, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
            )
    losses: list[float] = []

    class Noted(TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            if "loss" in logs:
                losses.append(logs["loss"])

    arguments = TrainingArguments(
        output_dir=str(folder / "stock"),
        per_device_train_batch_size=config.batch.micro_batch_size,
        gradient_accumulation_steps=config.batch.accumulation_steps,
        num_train_epochs=config.schedule.epochs or 1,
        learning_rate=config.optimizer.learning_rate,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(config.schedule.shape, config.schedule.shape),
        warmup_steps=config.schedule.warmup_updates,
        max_grad_norm=config.optimizer.max_grad_norm or 0.0,
        optim="adamw_torch_fused",
        weight_decay=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )

    class InOrder(Trainer):
        """Takes the micro batches as they come, epoch by epoch."""

        def get_train_dataloader(self) -> Any:
            return Loader(rows)

    class Loader:
        def __init__(self, epochs: list[list[dict[str, Any]]]) -> None:
            self.epochs = iter(epochs)
            self.length, self.dataset = len(epochs[0]), range(10)

        def __len__(self) -> int:
            return self.length

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter(next(self.epochs))

    InOrder(model=model, args=arguments, train_dataset=list(range(10)), callbacks=[Noted()]).train()
    return losses


def batches_of(config: TrainingConfig, folder: Path) -> list[list[dict[str, Any]]]:
    """Return the micro batches of three epochs as the Trainer takes them: labels where ours are, unshifted."""
    from foretune.api.rows import row_preparation
    from foretune.data import open_store
    from foretune.runtime.feed import Feed, Rows
    from foretune.runtime.preparation import prepare_rows

    task = row_preparation(config, config.data.train, limit=config.batch.sequence_length, cache=folder / "oracle")
    *_, found = prepare_rows(task)
    feed = Feed(Rows(open_store(found.place), found.row_lengths), config, 2)

    def tensors(rows: Any) -> dict[str, Any]:
        host = feed.batch(rows)
        ids = torch.tensor([list(row) for row in host.input_ids])
        return {"input_ids": ids, "labels": torch.tensor([list(row) for row in host.labels])}

    return [[tensors(rows) for rows in feed.plan(epoch)] for epoch in range(3)]


# -- length and learning rate


@pytest.mark.parametrize(
    ("name", "shape"), [("constant_with_warmup", "constant"), ("linear", "linear"), ("cosine", "cosine")]
)
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 7), (3, 10), (9, 10)])
def test_the_learning_rate_is_that_of_transformers(name: str, shape: str, warmup: int, total: int) -> None:
    from transformers import get_scheduler

    from foretune.contract import ScheduleSettings

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    ours = ScheduleSettings.create(shape=shape, warmup_updates=warmup)
    for update in range(total):
        assert learning_rate_factor(ours, update, total) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_updates_count_passes_and_no_update_crosses_an_epoch() -> None:
    from foretune.contract import ScheduleSettings

    length = run_length(ScheduleSettings.create(epochs=1.5), 5, 2)
    assert (length.updates_per_epoch, length.last_group, length.num_updates) == (3, 1, 5)
    assert [tuple(length.place(update)) for update in range(4)] == [(0, 0, 2), (0, 2, 4), (0, 4, 5), (1, 0, 2)]
    assert run_length(ScheduleSettings.create(updates=7), 5, 2).num_updates == 7
    with pytest.raises(ConfigError, match="never reach its peak"):
        run_length(ScheduleSettings.create(epochs=1.0, warmup_updates=3), 5, 2)


# -- before the folder exists


def test_a_plan_writes_nothing(tmp_path: Path, prediction: None) -> None:
    config = configured(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    *_, plan = plan_training(config)
    assert (plan.num_updates, plan.updates_per_epoch, plan.data.num_rows) == (12, 6, 12)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_not_empty_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    config = configured(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="not empty"):
        run(config)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "run.failed-start.json").exists()


def test_a_failed_start_leaves_a_record_beside_and_does_not_burn_its_name(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [conversation(0), {"messages": []}])
    config = configured(tmp_path, data__train=str(rows))
    with pytest.raises(ValueError, match=r"rows\.jsonl") as caught:
        run(config)
    beside = tmp_path / "run.failed-start.json"
    assert caught.value.record == str(beside)
    record = read_record(beside)
    assert record.outcome == "data-error"
    assert record.failure is not None
    assert not (tmp_path / "run").exists()
    write_rows(rows, [conversation(number) for number in range(4)])
    assert isinstance(run(config)[-1], RunFinished)
    assert not beside.exists()


def test_the_record_says_what_was_asked_and_what_ran(tmp_path: Path, prediction: None) -> None:
    config = configured(tmp_path, evaluation__split=0.25)
    run(config)
    record = read_record(tmp_path / "run/record.json")
    assert record.prediction is not None
    assert record.prediction.kind == "traced"
    assert record.requested == config
    assert record.base is not None
    assert record.base.model_class == "LlamaForCausalLM"
    assert record.data is not None
    assert (record.data.num_rows, record.data.held_out_rows, record.data.dropped_rows) == (12, 3, 0)
    assert record.pad is not None
    assert record.scope is not None
    assert record.scope.updates_done == record.scope.num_updates == 10
    assert record.scope.tokens_per_second is not None
    assert {reading.phase for reading in record.readings} >= {
        *("load", "prepare", "rehearsal", "forward", "loss", "backward", "optimizer", "evaluation", "save"),
        *("forward (later)", "loss (later)", "backward (later)", "optimizer (later)"),
    }
    text = json.loads((tmp_path / "run/record.json").read_text())
    assert "peak_allocated_bytes" not in text["readings"][0]
    assert {f"{check.field} {check.moment}" for check in record.checks} >= {
        "attention before",
        "attention after",
        "trained weights after",
        "optimizer states after",
    }


def test_instructions_and_conversations_have_their_own_form(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [instruction(number) for number in range(6)])
    finished = run(configured(tmp_path))[-1]
    artifact = json.loads((Path(finished.folder) / "adapter/artifact.json").read_text())
    assert artifact["format"]["kind"] == "instruction"
    assert artifact["format"]["example_prompt"].startswith("### Instruction:\n")
    with pytest.raises(ConfigError, match="format messages is asked for"):
        evaluated(tmp_path, prompts=("Hi",), format="messages")
    said = evaluated(tmp_path, prompts=("Hi",), max_new_tokens=5).generations[0]
    assert said.prompt == "### Instruction:\nHi\n\n### Response:\n"
    other = evaluated(tmp_path, prompts=("Hi",), max_new_tokens=5, format="messages", allow_other_format=True)
    assert other.generations[0].prompt.startswith("<|im_start|>user")


def test_packed_rows_are_trained_as_if_alone(tmp_path: Path) -> None:
    """The first update of a packed run has the loss of the same rows unpacked."""
    packed = configured(
        tmp_path, num_rows=6, batch__packing=True, batch__micro_batch_size=8, schedule__updates=1, schedule__epochs=...
    )
    alone = configured(
        tmp_path, batch__micro_batch_size=6, schedule__updates=1, schedule__epochs=..., output=str(tmp_path / "alone")
    )
    assert losses_of(run(packed)) == pytest.approx(losses_of(run(alone)), rel=1e-5)
    record = read_record(tmp_path / "run/record.json")
    assert [check.effective for check in record.checks if check.field == "packed examples"] == ["isolated"] * 2


def test_same_seed_same_run_and_another_seed_another(tmp_path: Path) -> None:
    def record_of(name: str, seed: int) -> RunRecord:
        config = configured(tmp_path, seed=seed, lora__dropout=0.2, output=str(tmp_path / name))
        finished: RunFinished = run(config)[-1]
        return finished.record

    one, two, other = record_of("one", 0), record_of("two", 0), record_of("other", 1)
    assert one.init_adapter_sha256 == two.init_adapter_sha256 != other.init_adapter_sha256
    assert one.row_order_sha256 == two.row_order_sha256 != other.row_order_sha256
    assert one.scope is not None
    assert two.scope is not None
    assert one.scope.last_loss == two.scope.last_loss


def test_a_pickle_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    from runs.made_run import copy_model

    folder = copy_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match="pickles only"):
        run(configured(tmp_path, model=folder))


def test_perplexity_is_that_of_the_loss(tmp_path: Path) -> None:
    run(configured(tmp_path))
    answer = evaluated(tmp_path, data=str(settings(tmp_path)["data.train"]))
    assert answer.loss is not None
    assert answer.perplexity == pytest.approx(math.exp(answer.loss))
    assert model_folder().is_dir()
