"""What a review found in the journey of a run: things that end it wrongly, or that a check passed over."""

import errno
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs.made_live import FAMILIES, alive, family_folder, made_config, update
from runs.made_run import configured, conversation, copy_model, write_rows
from safetensors.torch import load_file, save_file

import foretune.runtime.artifact
import foretune.runtime.preflight
from foretune import durable
from foretune.api import RunPlanned, plan_training, train
from foretune.cli.run_view import RunView
from foretune.contract import OptimizerSettings
from foretune.errors import NonFiniteLossError, OutOfMemoryError, RunError, SaveError
from foretune.evidence import read_record
from foretune.runtime.border import quietly
from foretune.runtime.checkpoint import ProgressState, load_checkpoint, save_checkpoint
from foretune.runtime.failures import running
from foretune.runtime.feed import on_device
from foretune.runtime.live import Live
from foretune.runtime.run_events import CheckpointSaved, RunFinished

EIGHT_BIT = OptimizerSettings.create(name="adamw_8bit", learning_rate=0.01)
FULL = OptimizerSettings.create(learning_rate=0.001)
PROGRESS = ProgressState(update=2, fingerprint="a", label_sha256="b", base_sha256="c")


def states(live: Live) -> list[dict[str, Any]]:
    return [live.optimizer.state[parameter] for parameter in live.trained.values()]


def test_a_checkpoint_holds_the_states_of_an_8_bit_optimizer(tmp_path: Path) -> None:
    """bitsandbytes hides them from FSDP in a dictionary of their own."""
    before, after = alive(made_config(optimizer=EIGHT_BIT)), alive(made_config(optimizer=EIGHT_BIT))
    update(before, 2)
    with quietly():
        load_checkpoint(save_checkpoint(tmp_path, before, PROGRESS), after)
    for one, other in zip(states(before), states(after), strict=True):
        assert set(one) == set(other)
        for name, value in one.items():
            assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
    assert update(before) == update(after)
    assert all(
        torch.equal(one, other) for one, other in zip(before.trained.values(), after.trained.values(), strict=True)
    )


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
def test_settings_of_generation_that_transformers_does_not_write_do_not_cost_a_run_its_model(
    place: str, tmp_path: Path
) -> None:
    """A temperature without `do_sample` is read with a warning, and refused when it is to be saved."""
    model = copy_model(tmp_path)
    (model / "generation_config.json").unlink(missing_ok=True)
    known = json.loads((model / place).read_text()) if (model / place).exists() else {"eos_token_id": 2}
    (model / place).write_text(json.dumps({**known, "temperature": 0.9, "top_p": 0.6}))
    *_, finished = train(configured(tmp_path, model=model, lora=None, optimizer__learning_rate=0.001).config)
    assert isinstance(finished, RunFinished)
    written = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert written["temperature"] == 0.9
    assert 2 in written["eos_token_id"]


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "glm4_moe"])
@pytest.mark.parametrize("harm", ["changed", "lost"])
def test_a_tensor_that_is_stored_under_another_name_is_compared_too(model_type: str, harm: str, tmp_path: Path) -> None:
    assert model_type in FAMILIES
    live = alive(made_config(family_folder(model_type), lora=None, optimizer=FULL))
    with quietly():
        (file,) = foretune.runtime.artifact._write_model(tmp_path, live, (2,))
        foretune.runtime.artifact._compare([file], live)
        stored = load_file(file)
        for name in [name for name in stored if name.endswith("down_proj.weight")]:
            other = {key: value for key, value in stored.items() if key != name or harm == "changed"}
            save_file({**other, **({name: stored[name] + 1} if harm == "changed" else {})}, file)
            with pytest.raises(SaveError, match="is missing" if harm == "lost" else "differs"):
                foretune.runtime.artifact._compare([file], live)


def test_an_evaluation_that_is_no_number_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = write_rows(tmp_path / "held-out.jsonl", [conversation(99)])

    def without_end(*given: Any) -> Any:
        batch = on_device(*given)
        return batch._replace(targets_BS=torch.full_like(batch.targets_BS, -100))

    monkeypatch.setattr("foretune.runtime.evaluation.on_device", without_end)
    monkeypatch.setattr("foretune.runtime.loss.F.cross_entropy", _endless(torch.nn.functional.cross_entropy))
    config = configured(tmp_path, evaluation__data=str(held_out)).config
    with pytest.raises(NonFiniteLossError, match="loss of an evaluation"):
        list(train(config))
    assert read_record(tmp_path / "run" / "record.json").outcome == "non-finite"
    assert "null," not in (tmp_path / "run" / "updates.jsonl").read_text()


def _endless(real: Any) -> Any:
    def cross_entropy(scores: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        found: torch.Tensor = real(scores, targets, **options)
        return found + math.inf if bool((targets == -100).all()) else found

    return cross_entropy


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF])
def test_a_file_system_that_syncs_no_folders_is_written_to(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    durable.replace_file(tmp_path / "record.json", b"whole")
    assert (tmp_path / "record.json").read_bytes() == b"whole"


def test_a_disk_that_had_room_for_the_run_has_room_to_resume_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, checkpoint__every_updates=2, checkpoint__keep=3).config
    *_, plan = plan_training(config)
    assert isinstance(plan, RunPlanned)
    room = plan.disk_bytes
    folder = tmp_path / "run" / "checkpoints"

    class Disk:
        """Has just the room that the run asks for, of which its checkpoints take theirs."""

        @staticmethod
        def disk_usage(place: Path) -> SimpleNamespace:
            taken = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            return SimpleNamespace(free=room - taken)

    monkeypatch.setattr(foretune.runtime.preflight, "shutil", Disk)
    run = train(config)
    for event in run:
        if isinstance(event, CheckpointSaved) and event.update == 8:
            break
    run.close()  # type: ignore[attr-defined] # it is a generator
    *_, finished = train(config, resume=True)
    assert isinstance(finished, RunFinished)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA error: device-side assert triggered", RunError),
        ("CUDA error: out of memory", OutOfMemoryError),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", OutOfMemoryError),
    ],
)
def test_what_a_device_says_late_in_our_own_line_is_not_our_mistake(text: str, kind: type[Exception]) -> None:
    with pytest.raises(kind), running(lambda: "backward"):
        raise RuntimeError(text)


class Gone:
    """A terminal that was closed."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def flush(self) -> None: ...

    def fileno(self) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def test_a_terminal_that_was_closed_does_not_end_a_run_before_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who closes it sends SIGHUP, and after that the run writes one; it must come so far."""
    monkeypatch.setattr("foretune.cli.run_view.standard_streams", lambda: (None, Gone()))
    view = RunView()
    view.say("on")
    view.phase("load")
    view.end()


def test_a_line_that_moves_is_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(Gone):
        said = ""

        def write(self, text: str) -> int:
            self.said += text
            return len(text)

        def fileno(self) -> int:
            return 2

    stream = Wide()
    monkeypatch.setattr("foretune.cli.run_view.standard_streams", lambda: (None, stream))
    monkeypatch.setattr("foretune.cli.run_view.os.get_terminal_size", lambda number: os.terminal_size((40, 24)))
    RunView().phase("a phase of which there is more to say than forty columns hold")
    assert len(stream.said.removeprefix("\r\x1b[K")) < 40
