"""The loop: load, verify, rehearse, update, evaluate, keep, verify again, save. One iterator of events, one record."""

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import numpy
import torch

from foretune.contract import TrainingConfig
from foretune.data import Batch as HostBatch
from foretune.errors import ForetuneError, OutOfMemoryError, SaveError
from foretune.evidence import EvaluationReading, Scope
from foretune.runtime.artifact import save_artifact
from foretune.runtime.border import quietly
from foretune.runtime.checkpoint import (
    checkpoint_name,
    discard_checkpoints_after,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from foretune.runtime.digest import sha256_of
from foretune.runtime.evaluation import mean_loss
from foretune.runtime.failures import explained, failure_of, outcome_of, running
from foretune.runtime.feed import on_device
from foretune.runtime.interrupts import Interrupts, Stopped
from foretune.runtime.live import Live, assemble, fingerprints, make_live_optimizer, remember
from foretune.runtime.load import load_model
from foretune.runtime.meter import Meter
from foretune.runtime.run_events import CheckpointSaved, PhaseBegan, RunEvent, RunFinished, RunResumed, UpdateDone
from foretune.runtime.run_folder import RECORD, RunFolder, now
from foretune.runtime.run_plan import RunPlan
from foretune.runtime.schedule import learning_rate_factor
from foretune.runtime.update import Batch, Update, require_finite, run_update
from foretune.runtime.verify import require_gradients, require_verified

__all__ = ["train_run"]

MOST_UNUSED = 100


def train_run(
    plan: RunPlan, folder: RunFolder, interrupts: Interrupts, *, meter: Meter, checkpoint: Path | None = None
) -> Iterator[RunEvent]:
    """Run a plan in a folder that is held, and end its record however it ends.

    Raises OutOfMemoryError, VerificationError, NonFiniteLossError, SaveError, InterruptedRunError, RunError.
    """
    run = _Run(plan, folder, interrupts, meter)
    try:
        with interrupts.shielded():
            folder.begin(plan.record, plan.config)
        with running(lambda: meter.phase):
            _import_libraries(plan.config)
            meter.begin()
            yield from run.go(checkpoint)
    except (Stopped, KeyboardInterrupt) as stop:
        error = interrupts.error()
        run.end(error)
        raise error from stop
    except GeneratorExit:
        run.end(interrupts.error())
        raise
    except OutOfMemoryError as error:
        told = explained(error, plan.record.prediction, plan.config, plan.shape, plan.device)
        run.end(told)
        raise told from error
    except ForetuneError as error:
        run.end(error)
        raise
    except Exception as error:
        run.end(ForetuneError(f"A mistake in foretune: {type(error).__name__}: {error}"))
        raise


def _import_libraries(config: TrainingConfig) -> None:
    """Import what loading and adapting would import on their way, so that it is not counted as theirs."""
    with quietly():
        if config.lora is not None:
            import peft  # noqa: F401
        if config.quantization is not None or config.optimizer.name.endswith("8bit"):
            import bitsandbytes  # noqa: F401


class _Run:
    """What changes while a run goes on."""

    def __init__(self, plan: RunPlan, folder: RunFolder, interrupts: Interrupts, meter: Meter) -> None:
        self.plan, self.folder, self.interrupts, self.meter = plan, folder, interrupts, meter
        self.progress, self.record = plan.progress, plan.record
        self.num_tokens = self.num_supervised = 0
        self.seconds = 0.0
        self.saved_at = monotonic()
        self.live: Live

    def go(self, checkpoint: Path | None) -> Iterator[RunEvent]:
        if self.record.resumed_at:
            yield RunResumed(update=self.progress.update, warnings=self.record.warnings)
        yield self._begin("load")
        self._load()
        yield self._begin("prepare")
        self._prepare(checkpoint)
        self._verify("before")
        yield self._begin("rehearsal")
        self._rehearse()
        self.interrupts.wait_for_update()
        yield from self._updates()
        self._verify("after")
        yield self._begin("save")
        try:
            yield self._save()
        except (ForetuneError, OSError, RuntimeError, MemoryError):
            self._keep_what_was_trained()
            raise

    def _begin(self, phase: str) -> PhaseBegan:
        self.meter.enter(phase)
        return PhaseBegan(phase=phase)

    # -- before the first update
    def _load(self) -> None:
        plan, config = self.plan, self.plan.config
        assert plan.weights.folder is not None
        with quietly() as said:
            loaded = load_model(
                plan.raw_config,
                plan.weights.folder,
                precision=config.precision,
                quantization=config.quantization,
                attention=config.attention,
                device=config.device,
            )
        self.base = loaded.model
        assert self.record.base is not None
        base = self.record.base.with_(
            weights_sha256=self.progress.base_sha256,
            model_class=type(loaded.model).__name__,
            unused_tensors=loaded.unused[:MOST_UNUSED],
        )
        self._note(base=base, warnings=(*self.record.warnings, *said))

    def _prepare(self, checkpoint: Path | None) -> None:
        with quietly():
            self.live = assemble(self.base, self.plan.config, self.plan.facts, fingerprints(self.base))
            make_live_optimizer(self.live)
        self.trained = list(self.live.trained.values())  # walking the modules takes milliseconds on a large model
        self.live.base.get_output_embeddings().register_forward_pre_hook(self._enter_loss)
        if self.plan.config.lora is not None:
            self._note(init_adapter_sha256=sha256_of(self.live.trained.items()))
        if checkpoint is not None:
            load_checkpoint(checkpoint, self.live)
            remember(self.live)
        self._go_on()

    def _go_on(self) -> None:
        """Leave of an earlier process what the run stands on. Its last checkpoint may have been its last act."""
        discard_checkpoints_after(self.folder.checkpoints, self.progress.update)
        self._prune()
        self.folder.forget_after(self.progress.update, {each.update for each in self.progress.evaluations})
        if self.record.resumed_at:
            self._note(**self._best())

    def _verify(self, moment: Any) -> None:
        checks = require_verified(self.live, moment, self._first_packed())
        self._note(checks=(*self.record.checks, *checks))

    def _first_packed(self) -> Batch | None:
        """Return the first micro batch in which a row holds several examples."""
        if not self.plan.config.batch.packing:
            return None
        for rows in self.plan.feed.plan(0):
            if any(len(row) > 1 for row in rows):
                return self._on_device(self.plan.feed.batch(rows))
        return None

    def _rehearse(self) -> None:
        """Run the widest micro batch forward and backward, throw it away, and draw the same random numbers again."""
        states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        cuda = torch.cuda.get_rng_state() if self.live.device.type == "cuda" else None
        host = self.plan.feed.batch(self.plan.feed.widest())
        loss = self.live.step(*self._on_device(host)) / host.num_supervised
        require_finite(loss.item(), "loss of the widest micro batch")
        loss.backward()
        del loss
        require_gradients(self.live)
        for parameter in self.live.trained.values():
            parameter.grad = None
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
            torch.cuda.empty_cache()

    # -- updates
    def _updates(self) -> Iterator[RunEvent]:
        total = self.plan.length.num_updates
        yield from self._evaluate_if_due()  # who was stopped after an update was not asked to wait for this
        while self.progress.update < total:
            yield self._update()
            yield from self._stop_if_asked()
            yield from self._evaluate_if_due()
            yield from self._stop_if_asked()
            if self._is_checkpoint_due(self.progress.update):
                yield self._checkpoint()
        if self.plan.evaluation is not None and not self._is_evaluated():
            yield self._begin("evaluation")
            yield self._evaluate()

    def _stop_if_asked(self) -> Iterator[RunEvent]:
        """End with a checkpoint, where a signal asked for it."""
        if self.interrupts.is_asked:
            yield self._checkpoint()
            raise self.interrupts.error()

    def _evaluate_if_due(self) -> Iterator[RunEvent]:
        done = self.progress.update
        is_due = 0 < done < self.plan.length.num_updates and self._is_due(
            self.plan.config.evaluation.every_updates, done
        )
        if not is_due or self._is_evaluated():
            return
        yield self._begin("evaluation")
        yield self._evaluate()
        if self.progress.evaluations[-1].is_best and self._keeps_checkpoints():
            yield self._checkpoint()

    def _update(self) -> UpdateDone:
        plan, live, number = self.plan, self.live, self.progress.update
        start = monotonic()
        place = plan.length.place(number)
        order = plan.feed.plan(place.epoch)
        host = [plan.feed.batch(order[index]) for index in range(place.first, place.stop)]
        factor = learning_rate_factor(plan.config.schedule, number, plan.length.num_updates)
        rate = plan.config.optimizer.learning_rate * factor
        for group in live.optimizer.param_groups:
            group["lr"] = rate
        suffix = "" if number == plan.progress.update else " (later)"
        done = run_update(
            live.step,
            self._microsteps(host, suffix),
            sum(batch.num_supervised for batch in host),
            live.optimizer,
            plan.config.optimizer,
            self.trained,
            scaler=live.scaler,
            enter=lambda phase: self.meter.enter(f"{phase}{suffix}"),
        )
        seconds = monotonic() - start
        return self._count(number, done, host, rate, seconds, place.epoch + place.stop / plan.length.batches_per_epoch)

    def _microsteps(self, host: list[HostBatch], suffix: str) -> Iterator[Batch]:
        for batch in host:
            self.meter.enter(f"forward{suffix}")
            yield self._on_device(batch)

    def _enter_loss(self, *_: Any) -> None:
        """The loss begins where the head is called, unless backward recomputes it or nothing is trained."""
        before, _, later = self.meter.phase.partition(" ")
        if before == "forward":
            self.meter.enter(f"loss {later}".rstrip())

    def _on_device(self, batch: HostBatch) -> Batch:
        return on_device(batch, self.live.device, self.plan.config.batch)

    def _count(
        self, number: int, done: Update, host: list[HostBatch], rate: float, seconds: float, epoch: float
    ) -> UpdateDone:
        loss, num_tokens = sum(done.losses), sum(batch.num_tokens for batch in host)
        self.live.updates_applied += not done.was_skipped
        self.live.updates_here += 1
        self.num_tokens += num_tokens
        self.num_supervised += sum(batch.num_supervised for batch in host)
        self.seconds += seconds
        before = self.progress
        self.progress = before.with_(
            update=number + 1,
            skipped=before.skipped + done.was_skipped,
            first_loss=loss if before.first_loss is None else before.first_loss,
            last_loss=loss,
        )
        event = UpdateDone(
            update=number + 1,
            num_updates=self.plan.length.num_updates,
            epoch=epoch,
            loss=loss,
            learning_rate=rate,
            gradient_norm=done.gradient_norm,
            num_tokens=num_tokens,
            tokens_per_second=num_tokens / max(seconds, 1e-9),
            was_skipped=done.was_skipped,
        )
        self.folder.append(event)
        return event

    # -- evaluation and checkpoints
    def _evaluate(self) -> EvaluationReading:
        assert self.plan.evaluation is not None
        self.meter.enter("evaluation")
        loss, num_tokens = mean_loss(self.live, self.plan.evaluation)
        best = self.progress.best
        reading = EvaluationReading(
            update=self.progress.update,
            loss=loss,
            num_tokens=num_tokens,
            is_best=best is None or loss < best.loss,
        )
        self.progress = self.progress.with_(evaluations=(*self.progress.evaluations, reading))
        self.folder.append(reading)
        self._note(evaluations=self.progress.evaluations, **self._best())
        return reading

    def _best(self) -> dict[str, Any]:
        """Return the update of the best evaluation, and its checkpoint where that is there."""
        best = self.progress.best
        if best is None:
            return {}
        path = self.folder.checkpoints / checkpoint_name(best.update)
        kept = str(path.relative_to(self.folder.path)) if path.is_dir() else None
        return {"best_update": best.update, "best_checkpoint": kept}

    def _is_evaluated(self) -> bool:
        return any(each.update == self.progress.update for each in self.progress.evaluations)

    def _is_due(self, every: int | None, done: int) -> bool:
        return every is not None and done % every == 0

    def _keeps_checkpoints(self) -> bool:
        checkpoint = self.plan.config.checkpoint
        return checkpoint.every_updates is not None or checkpoint.every_minutes is not None

    def _is_checkpoint_due(self, done: int) -> bool:
        checkpoint = self.plan.config.checkpoint
        if self._is_due(checkpoint.every_updates, done):
            return True
        return checkpoint.every_minutes is not None and monotonic() - self.saved_at >= 60 * checkpoint.every_minutes

    def _checkpoint(self) -> CheckpointSaved:
        with self.interrupts.shielded():
            path = save_checkpoint(self.folder.checkpoints, self.live, self.progress)
            self._prune()
            self._note(**self._best())
        self.saved_at = monotonic()
        return CheckpointSaved(update=self.progress.update, path=str(path))

    def _prune(self) -> None:
        best = self.progress.best
        pinned = None if best is None else best.update
        prune_checkpoints(self.folder.checkpoints, self.plan.config.checkpoint.keep, pinned)

    # -- the end
    def _save(self) -> RunFinished:
        base = self.record.base
        assert base is not None
        precision = self.plan.config.precision
        facts = {
            "base": base,
            "format": self.plan.format,
            "stop_ids": self.plan.stop_ids,
            "pad": self.record.pad,
            "weight_dtype": precision.dtype,
            "adapter_dtype": precision.adapter_dtype if self.plan.config.lora is not None else None,
            "fingerprint": self.record.fingerprint,
            "updates": self.progress.update,
        }
        with self.interrupts.shielded(), quietly():
            path, _ = save_artifact(
                self.folder.path,
                self.live,
                facts,
                tokenizer_folder=self.plan.tokenizer_folder,
                example_ids=self.plan.example_ids,
            )
            self._finish(outcome="success", artifact=path.name)
            self.interrupts.finish()
        return RunFinished(folder=str(self.folder.path), record=self.record)

    def _keep_what_was_trained(self) -> None:
        """Write a checkpoint, as well as it goes: where an artifact cannot be saved, the training is not lost."""
        with suppress(ForetuneError, OSError, RuntimeError, MemoryError), self.interrupts.shielded():
            save_checkpoint(self.folder.checkpoints, self.live, self.progress)

    def end(self, error: ForetuneError) -> None:
        """End the record with a failure; one that has its artifact stays as it is."""
        if self.record.is_success:
            return
        with suppress(Stopped), self.interrupts.shielded():  # what came meanwhile ends what is ending
            try:
                self._finish(outcome=outcome_of(error), failure=failure_of(error))
            except SaveError:  # the disk does not take it: the record goes on to say `started`
                return
            error.record = str(self.folder.path / RECORD)

    def _finish(self, **changes: Any) -> None:
        is_oom = changes.get("outcome") == "oom"
        readings = () if is_oom else self.meter.readings()
        self._note(finished_at=now(), scope=self._scope(), readings=readings, **changes)

    def _scope(self) -> Scope:
        return Scope(
            num_updates=self.plan.length.num_updates,
            updates_done=self.progress.update,
            updates_skipped=self.progress.skipped,
            num_tokens=self.num_tokens,
            num_supervised_tokens=self.num_supervised,
            seconds=self.seconds or None,
            first_loss=self.progress.first_loss,
            last_loss=self.progress.last_loss,
        )

    def _note(self, **changes: Any) -> None:
        noted = self.record.with_(**changes)
        self.folder.write(noted)
        self.record = noted
