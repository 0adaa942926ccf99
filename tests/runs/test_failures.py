"""Every way to fail leaves one record, its own exit code and no artifact. The meter is the hook that makes it fail."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs.made_run import configured, copy_model, write_config, write_rows
from safetensors.torch import load_file, save_file

from foretune import durable
from foretune.api import train
from foretune.errors import ForetuneError, NonFiniteLossError, OutOfMemoryError, RunError, SaveError
from foretune.evidence import RunRecord, read_record
from foretune.runtime.failures import explained, running
from foretune.runtime.interrupts import Stopped
from foretune.runtime.meter import Meter

CUDA_SAYS = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 15.00 GiB"
CPU_SAYS = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4096 bytes. Error code 12"
)


PHASES = ("load", "rehearsal", "forward", "loss", "backward", "optimizer", "evaluation", "save")


class Failing(Meter):
    """Lets something happen where a phase begins."""

    def __init__(self, phase: str, happens: Callable[[], Any]) -> None:
        super().__init__("cpu")
        self.at, self.happens = phase, happens

    def enter(self, phase: str) -> None:
        super().enter(phase)
        if phase == self.at:
            self.happens()


def raising(error: BaseException) -> Callable[[], Any]:
    def happens() -> None:
        raise error

    return happens


def failed(folder: Path, meter: Meter | None = None, **changes: Any) -> tuple[ForetuneError, RunRecord]:
    config = configured(folder, evaluation__split=0.25, **changes).config
    with pytest.raises(ForetuneError) as caught:
        list(train(config, meter=meter))
    records = [*folder.glob("*.failed-start.json"), *folder.glob("run/record.json")]
    assert [str(path) for path in records] == [caught.value.record]
    return caught.value, read_record(records[0])


def assert_nothing_is_left(folder: Path) -> None:
    assert not (folder / "run/adapter").exists()
    assert [path for path in folder.rglob(".*") if path.name.startswith((".staged", ".record"))] == []


# -- out of memory


@pytest.mark.parametrize(
    ("phase", "error", "requested"),
    [
        *((phase, torch.OutOfMemoryError(CUDA_SAYS), 3 << 29) for phase in PHASES),
        ("backward", RuntimeError(CPU_SAYS), 4096),
        ("loss", MemoryError(), None),
    ],
    ids=str,
)
def test_out_of_memory_is_told_with_its_phase_and_without_a_peak(
    phase: str, error: BaseException, requested: int | None, tmp_path: Path
) -> None:
    """Case 144: the peak is absent, the outcome is oom, the request stands there."""
    told, record = failed(tmp_path, Failing(phase, raising(error)))
    assert isinstance(told, OutOfMemoryError)
    assert (told.exit_code, told.phase, told.requested_bytes) == (6, phase, requested)
    assert record.outcome == "oom"
    assert record.failure is not None
    assert (record.failure.phase, record.failure.requested_bytes) == (phase, requested)
    assert record.readings == ()
    assert not record.is_success
    text = (tmp_path / "run/record.json").read_text()
    assert "peak" not in json.dumps({k: v for k, v in json.loads(text).items() if k != "prediction"})
    assert_nothing_is_left(tmp_path)


def test_an_oom_on_a_card_names_the_largest_parts_and_changes_that_need_less() -> None:
    from foretune.api import build_config, estimate, find_device, resolve_model

    config = build_config({"model.id": "Qwen/Qwen2.5-7B", "lora.rank": 16, "gradient_checkpointing": False}).config
    device, shape = find_device("rtx 3090"), resolve_model("Qwen/Qwen2.5-7B", offline=True)
    needed = estimate(config, device=device, shape=shape).estimate
    assert needed is not None
    error = OutOfMemoryError("Out of memory in backward.")
    error.phase, error.requested_bytes = "backward", 7
    told = explained(error, needed, config, shape, device)
    assert "weights 14.19 GiB" in told.message
    assert told.hint is not None
    assert "gradient_checkpointing=true" in told.hint
    assert (told.phase, told.requested_bytes, told.exit_code) == ("backward", 7, 6)


# -- other failures


def test_a_loss_that_is_no_number_stops_before_a_weight_changes(tmp_path: Path) -> None:
    model = copy_model(tmp_path)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] = float("inf")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    told, record = failed(tmp_path, model=model)
    assert isinstance(told, NonFiniteLossError)
    assert (told.exit_code, record.outcome) == (12, "non-finite")
    assert_nothing_is_left(tmp_path)


def test_a_gradient_that_is_no_number_stops_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretune.runtime.update.clip_gradients", lambda *_: float("nan"))
    told, record = failed(tmp_path)
    assert "norm of the gradients is nan" in told.message
    assert (told.exit_code, record.outcome) == (12, "non-finite")


def test_a_weight_that_no_loss_reaches_is_told_before_the_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that the model's own code passes over: without the check it would fail after the last update."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x))))
    told, record = failed(tmp_path)
    assert "4 get none: " in told.message
    assert "up_proj" in told.message
    assert (told.exit_code, record.outcome, record.scope.updates_done if record.scope else None) == (
        11,
        "verification-error",
        0,
    )


def test_what_a_library_raises_is_a_run_error_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader's TypeError is an error, and never a second call with fewer settings."""
    from transformers import AutoModelForCausalLM

    calls = []

    def from_pretrained(*arguments: Any, **keywords: Any) -> Any:
        calls.append(keywords)
        return torch.nn.functional.linear(arguments[0], None)  # raises TypeError in torch's own code

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(TypeError):
        list(train(configured(tmp_path).config))
    assert len(calls) == 1
    assert read_record(tmp_path / "run/record.json").outcome == "runtime-error"


def test_a_foreign_exception_is_told_with_phase_and_place() -> None:
    with (
        pytest.raises(RunError, match=r"failed in backward: ValueError: .*torch/") as caught,
        running(lambda: "backward"),
    ):
        torch.nn.functional.cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long))
    assert caught.value.exit_code == 10


def test_our_own_mistake_is_no_run_error() -> None:
    with pytest.raises(KeyError), running(lambda: "forward"):
        {}["missing"]


def test_a_disk_that_takes_no_artifact_is_a_save_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def at(point: str) -> None:
        if point == "rename":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "at", at)
    told, record = failed(tmp_path)
    assert isinstance(told, SaveError)
    assert "No space left on device" in told.message
    assert (told.exit_code, record.outcome) == (13, "save-error")
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("phase", ["load", "backward (later)", "save"])
def test_an_interrupt_is_one_record(phase: str, tmp_path: Path) -> None:
    told, record = failed(tmp_path, Failing(phase, raising(Stopped())))
    assert (told.exit_code, record.outcome) == (130, "interrupted")
    assert_nothing_is_left(tmp_path)


def test_who_stops_listening_interrupts_the_run(tmp_path: Path) -> None:
    events = train(configured(tmp_path).config)
    for event in events:
        if type(event).__name__ == "UpdateDone":
            break
    events.close()
    assert read_record(tmp_path / "run/record.json").outcome == "interrupted"
    assert_nothing_is_left(tmp_path)


# -- starts that fail


def test_a_missing_library_is_a_record_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretune.runtime import libraries

    known = libraries.version_of
    monkeypatch.setattr(libraries, "version_of", lambda name: None if name == "peft" else known(name))
    told, record = failed(tmp_path)
    assert (told.exit_code, record.outcome) == (7, "dependency-error")
    assert "foretune[train]" in str(told.hint)


def test_a_warm_up_beyond_the_end_is_a_config_error_with_a_record(tmp_path: Path) -> None:
    """Case 127: three rows, a large accumulation, a long warm-up."""
    told, record = failed(tmp_path, num_rows=4, batch__accumulation_steps=16, schedule__warmup_updates=100)
    assert (told.exit_code, record.outcome) == (2, "config-error")
    assert "never reach its peak" in told.message


def test_a_model_that_cannot_be_had_is_an_access_error(tmp_path: Path) -> None:
    told, record = failed(tmp_path, model="nobody/nothing")
    assert (told.exit_code, record.outcome) == (4, "access-error")


def test_an_adapter_in_place_of_a_base_is_refused(tmp_path: Path) -> None:
    model = copy_model(tmp_path)
    (model / "adapter_config.json").write_text("{}")
    told, _ = failed(tmp_path, model=model)
    assert "holds an adapter" in told.message


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    model = copy_model(tmp_path)
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    told, record = failed(tmp_path, model=model)
    assert "no weights for 1 of the model's tensors" in told.message
    assert record.outcome == "config-error"


# -- the command line


def test_a_failure_is_one_json_line_with_its_code(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(Path("run.yaml"), tmp_path)
    write_rows(tmp_path / "rows.jsonl", [{"messages": []}])
    called = call("train", "run.yaml", "--json")
    assert called.code == 5
    *_, last = map(json.loads, called.out.splitlines())
    assert last["error"]["exit_code"] == 5
    assert last["error"]["record"].endswith("first.failed-start.json")


def test_a_run_is_a_line_of_json_for_each_event(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(Path("run.yaml"), tmp_path, num_rows=4)
    called = call("train", "run.yaml", "--json")
    assert called.code == 0, called.out
    lines = [json.loads(line)["schema"].split("/")[0] for line in called.out.splitlines()]
    assert lines[0] == "foretune.train.plan"
    assert lines.count("foretune.train.update") == 4
    assert lines[-1] == "foretune.train"
