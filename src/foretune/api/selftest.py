"""The self-test of `doctor`: every journey once, on a model that is made here and thrown away."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from foretune.contract import TrainingConfig, build_config
from foretune.errors import ForetuneError, VerificationError
from foretune.machine import Finding, Private, private_words
from foretune.units import format_bytes

__all__ = ["selftest_findings"]

NUM_UPDATES = 4


def selftest_findings(*, use_gpu: bool = False) -> Iterator[Finding]:
    """Make a tiny model, estimate, trace, train, save and reload it; with `use_gpu` compute on the first card too.

    Everything is in a temporary folder that is removed. What fails is a finding with its reason, and what rests on it
    is not run.
    """
    private = private_words()
    with TemporaryDirectory(prefix="foretune-selftest-") as folder:
        bench = _Bench(Path(folder))
        failed = None
        for name, step in bench.steps():
            if failed is not None:
                found = f"{name}: not run, because of {failed}"
                yield Finding(check=f"selftest.{_slug(name)}", group="Self-test", state="unknown", found=found)
                continue
            finding = _outcome(name, step, private)
            failed = name if finding.is_wrong else None
            yield finding
    for name, step in _gpu_steps() if use_gpu else ():
        yield _outcome(name, step, private)


def _slug(name: str) -> str:
    return name.replace(" ", "-")


def _outcome(name: str, step: Callable[[], str], private: Private) -> Finding:
    """Run a step. A self-test is there to report whatever goes wrong, so nothing passes through."""
    check = f"selftest.{_slug(name)}"
    try:
        found = step()
    except ForetuneError as error:
        texts = private.foreign(error.message), None if error.hint is None else private.foreign(error.hint)
    except Exception as error:
        texts = f"{type(error).__name__}: {private.foreign(str(error))}", None
    else:
        return Finding(check=check, group="Self-test", state="ok", found=f"{name}: {found}")
    return Finding(check=check, group="Self-test", state="problem", found=f"{name} failed: {texts[0]}", advice=texts[1])


class _Bench:
    """The steps on a CPU, in one folder; each leaves what the next one needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = str(folder / "run")

    def steps(self) -> tuple[tuple[str, Callable[[], str]], ...]:
        return (
            ("sample model", self.make),
            ("estimate and trace", self.predict),
            ("training", self.train),
            ("reloading", self.reload),
        )

    def make(self) -> str:
        from foretune.runtime.sample import make_sample_model, sample_rows

        made = make_sample_model(self.folder / "model")
        rows = sample_rows()
        (self.folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        size = sum(path.stat().st_size for path in made.iterdir())
        return f"{format_bytes(size)} written, {len(rows)} rows"

    def predict(self) -> str:
        """Hold the estimate for a card against the trace of the real program."""
        from foretune.api import estimate, trace

        config = self._config({"precision.dtype": "bf16", "batch.sequence_length": 128})
        estimated, traced = estimate(config, offline=True).estimate, trace(config, offline=True).answer.estimate
        assert estimated is not None, "the sample model has an estimate"
        one, two = estimated.allocated_bytes, traced.allocated_bytes
        if one != two:
            raise VerificationError(
                f"The estimate gives {one:,} bytes allocated, and the trace of the real program {two:,}.",
                hint="A library has changed: please report it with `foretune doctor --json`.",
            )
        return f"{format_bytes(one)} allocated (estimated), the same to the byte (traced)"

    def train(self) -> str:
        from foretune.api import train

        config = self._config(
            {
                "device": "cpu",
                "precision.dtype": "fp32",
                "data.train": str(self.folder / "rows.jsonl"),
                "data.supervision": "assistant_only",
                "batch.sequence_length": 128,
                "batch.micro_batch_size": 2,
                "schedule.updates": NUM_UPDATES,
                "output": self.run,
            }
        )
        *_, finished = train(config, offline=True, workers=1, use_cache=False)
        record: Any = finished.record  # type: ignore[union-attr]  # the last event is the finished run
        scope = record.scope
        if not record.is_success or scope.updates_done != NUM_UPDATES or not math.isfinite(scope.last_loss):
            raise VerificationError(f"The run ended with {record.outcome} after {scope.updates_done} updates.")
        return f"{scope.updates_done} updates on the CPU, loss {scope.last_loss:.3f}{_beside(record)}"

    def reload(self) -> str:
        from foretune.api import evaluate

        *_, answer = evaluate(self.run, offline=True, workers=1)
        probe = answer.record.probe  # type: ignore[union-attr]  # the last item is the answer
        assert probe is not None
        exact = "bit by bit" if probe.is_bitwise_equal else f"within {probe.max_abs_difference:.2g}"
        return f"the saved artifact gives the logits of the run {exact}"

    def _config(self, fields: dict[str, Any]) -> TrainingConfig:
        return build_config(
            {"model.id": str(self.folder / "model"), "lora.rank": 4, "lora.alpha": 8.0, **fields}
        ).config


def _beside(record: Any) -> str:
    """Put the growth of the process beside its prediction, where both are known."""
    measured = [reading.peak_process_bytes for reading in record.readings if reading.peak_process_bytes is not None]
    if not measured or record.prediction is None:
        return ""
    predicted = record.prediction
    return (
        f"; the process grew by {format_bytes(max(measured))} (measured), "
        f"{format_bytes(predicted.process_bytes)} were predicted ({predicted.kind})"
    )


def _gpu_steps() -> tuple[tuple[str, Callable[[], str]], ...]:
    return (("16-bit products", _products), ("memory of the card", _memory), ("nf4 layer", _nf4))


def _products() -> str:
    from foretune import devices
    from foretune.runtime.arithmetic import check_matmul

    has_bf16 = next(iter(devices.detect_devices().devices)).has_bf16
    dtypes = ("bf16", "fp16") if has_bf16 else ("fp16",)
    errors = [f"{dtype} within {check_matmul('cuda', dtype):.2g} of fp32" for dtype in dtypes]  # type: ignore[arg-type]
    return ", ".join(errors)


def _memory() -> str:
    from foretune.runtime.arithmetic import check_allocator

    return f"{format_bytes(check_allocator())} taken and given back, as the driver sees it (measured)"


def _nf4() -> str:
    from foretune.runtime.arithmetic import check_nf4

    return f"finite, within {check_nf4('cuda'):.2g} of fp32"
