"""From a run's adapters to a whole model: the base's files, in which the weights that were adapted are other ones.

Written tensor by tensor and held against the logits that the run stored, before the folder has its name.
"""

import json
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from foretune import __version__
from foretune.durable import at, publish_folder, remove_folder, staged, told, write_file
from foretune.errors import RunDirectoryError, SaveError
from foretune.evidence import MergeCheck, MergedLayer, RunRecord, WeightDtype
from foretune.memory.components import Facts
from foretune.models import StoredTensor, WeightFiles, read_safetensors_header
from foretune.runtime.artifact import (
    ARTIFACT,
    CARD,
    ArtifactFacts,
    copy_tokenizer,
    probe_logits,
    read_probe,
    write_generation,
    write_probe,
)
from foretune.runtime.border import quietly
from foretune.runtime.failures import running
from foretune.runtime.interrupts import Interrupts
from foretune.runtime.load import DTYPES, load_model
from foretune.runtime.merge_card import merge_card
from foretune.runtime.merge_check import Compared, check_of
from foretune.runtime.merge_layers import LayerChange, Skeleton, adapted_skeleton, merge_layer, replace_whole
from foretune.runtime.patched_files import compare_patched, write_patched
from foretune.runtime.run_events import PhaseBegan
from foretune.runtime.run_folder import merge_of, note_later, now
from foretune.values import encode_json

__all__ = ["MergeDone", "MergeTask", "disk_bytes", "host_bytes", "merge_run", "merge_task", "refuse_taken"]

SMALL_FILES_BYTES = 16 << 20
"""Room for what stands beside the weights: tokenizer, probe, records."""
COPIES = 8
"""Copies in fp32 of the largest adapted weight that are held at most: base, sum, product, its parts, differences
(measured on a weight of 4,096 x 4,096: 4.7 by LoRA, 6.0 by DoRA, up to 6.9 where the base was quantized)."""
WHOLE_COPIES = 4
"""Copies in fp32 of the largest tensor that was trained whole, beside itself: base, rounded, and their difference."""
LIBRARY_BYTES = 384 << 20
"""What the libraries hold beside that: kernels, module trees, and what malloc keeps of freed pieces up to 32 MiB
(measured on a model of 143 million weights: 50 to 267 MiB beside the largest weight or what is copied)."""
LOGIT_BYTES = 12
"""For each logit of a probe row: as the model gives it, and in fp32."""
INDEX, CONFIG = "model.safetensors.index.json", "config.json"


class MergeTask(NamedTuple):
    """What is merged, and where to; everything was checked that can be checked before."""

    run: Path
    final: Path
    trained: RunRecord
    artifact: Path
    described: ArtifactFacts
    weights: WeightFiles
    raw_config: dict[str, Any]
    facts: Facts
    skeleton: Skeleton
    tensors: dict[str, StoredTensor]
    attention: str
    """Which the check runs: the run's own, or one that a CPU has."""

    @property
    def folder(self) -> Path:
        """Where the base's files are."""
        assert self.weights.folder is not None
        return self.weights.folder

    @property
    def dtypes(self) -> tuple[WeightDtype, ...]:
        """The formats of the weights that are merged into, the most frequent one first."""
        counts: dict[WeightDtype, int] = {}
        for change in self.skeleton.layers:
            counts[change.dtype] = counts.get(change.dtype, 0) + 1
        return tuple(sorted(counts, key=lambda name: -counts[name]))


class MergeDone(NamedTuple):
    """A merged model that has its place."""

    record: RunRecord
    record_file: Path


def refuse_taken(final: Path) -> None:
    """Refuse an output that exists, or that has a file in its way. Raises RunDirectoryError."""
    for above in final.parents:
        if above.exists() and not above.is_dir():
            raise RunDirectoryError(f"{above} is a file, and a model needs a folder.", hint="Choose another --output.")
    if final.is_symlink() or final.exists():
        raise RunDirectoryError(
            f"{final} exists already.", hint="Choose another place with --output FOLDER; nothing is overwritten."
        )


def refuse_inside(final: Path, *folders: Path | None) -> None:
    """Refuse an output inside a folder whose files are listed, or are not ours. Raises RunDirectoryError."""
    for folder in folders:
        if folder is not None and final.resolve().is_relative_to(folder.resolve()):
            raise RunDirectoryError(f"{final} stands inside {folder}.", hint="Choose another --output.")


def merge_task(
    run: Path,
    final: Path,
    found: tuple[RunRecord, Path, ArtifactFacts],
    weights: WeightFiles,
    raw_config: dict[str, Any],
    facts: Facts,
) -> MergeTask:
    """Find every weight that a merge changes, on meta. Raises UnsupportedError, VerificationError, ConfigError."""
    trained, artifact, described = found
    asked, tensors = trained.requested.attention, weights.tensors()
    attention = "eager" if asked == "flash_attention_2" else asked
    with running(lambda: "the plan of the merge"), quietly():
        skeleton = adapted_skeleton(
            trained.requested, facts, raw_config, artifact, attention=attention, tensors=tensors
        )
    return MergeTask(run, final, trained, artifact, described, weights, raw_config, facts, skeleton, tensors, attention)


def disk_bytes(task: MergeTask) -> int:
    """Return the bytes that a merge writes: files as large as the base's, and small ones beside them."""
    return sum((task.folder / file).stat().st_size for file in task.weights.files) + SMALL_FILES_BYTES


def host_bytes(task: MergeTask) -> int:
    """Estimate the memory that a merge holds at most at once.

    Adapters in fp32; beside them either one weight that is merged, or the model that is run: tensors that have another
    format in the files than the run's, or that are stacked when they are loaded, are copied; all others are the files'
    own pages, which the system takes back when it needs them.
    """
    adapters = sum(
        parameter.numel() * 4
        for change in task.skeleton.layers
        for parameter in change.layer.parameters()
        if not parameter.is_meta
    ) + sum(each.numel() * 4 for each in task.skeleton.whole.values())
    layers = [COPIES * change.num_weights for change in task.skeleton.layers]
    whole = [WHOLE_COPIES * each.numel() for each in task.skeleton.whole.values()]
    merging = 4 * max((*layers, *whole), default=0)
    dtype = task.trained.requested.precision.dtype
    item, own = DTYPES[dtype].itemsize, {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}[dtype]
    copied = sum(
        _numel(tensor) * item
        for name, tensor in task.tensors.items()
        if tensor.dtype != own or name not in task.skeleton.stored
    )
    rows, _ = read_probe(task.artifact)
    logits = max(row.numel() for row in rows) * task.facts.shape.vocab_size * LOGIT_BYTES
    return LIBRARY_BYTES + adapters + max(merging, copied + logits)


def _numel(tensor: StoredTensor) -> int:
    number = 1
    for size in tensor.shape:
        number *= size
    return number


# -- the merge


def merge_run(task: MergeTask, interrupts: Interrupts) -> Generator[PhaseBegan | MergeDone]:
    """Merge, verify and publish; the last item says what was found. The run's folder is held by the caller.

    Raises VerificationError, SaveError, OutOfMemoryError, RunError; nothing is left then.
    """
    started_at = now()
    with told(task.final):
        task.final.parent.mkdir(parents=True, exist_ok=True)
    rows, stored = read_probe(task.artifact)
    with staged(task.final) as draft, running(lambda: "the merge"):
        yield PhaseBegan(phase="base")
        of_base, generation = _logits(task, task.folder, rows)
        yield PhaseBegan(phase="merge")
        made = _write_weights(task, draft)
        _write_config(task, draft)
        yield PhaseBegan(phase="check")
        of_merged, _ = _logits(task, draft, rows)
        check = check_of(
            task.trained.requested,
            Compared(stored, of_base, of_merged),
            layers=made.layers,
            replaced=made.replaced,
            num_copied=len(task.tensors) - len(made.layers) - len(made.replaced),
            attention=task.attention,
            dtypes=task.dtypes,
        )
        write_generation(draft, generation, task.described.stop_ids)
        write_probe(draft, rows, of_merged)
        _write_rest(task, draft, check)
        yield PhaseBegan(phase="save")
        with interrupts.shielded():
            publish_folder(draft, task.final)
            done = _noted(task, merge_of(task.trained, check, started_at))
            interrupts.finish()
    yield done


def _noted(task: MergeTask, record: RunRecord) -> MergeDone:
    """Keep the record. Who is told that this failed must not find the merged model either."""
    record = record.with_(artifact=_place_of(task))
    try:
        return MergeDone(record, note_later(task.run, record))
    except SaveError:
        with suppress(OSError):
            remove_folder(task.final)
        raise


def _place_of(task: MergeTask) -> str:
    """Return where the merged model is: within the run's folder, or the path that was given."""
    is_inside = task.final.parent == task.run
    return task.final.name if is_inside else str(task.final)


def _logits(task: MergeTask, folder: Path, rows: list[Tensor]) -> tuple[list[Tensor], Any]:
    """Run a folder's model on the probe's rows, on the CPU and in the run's precision; its settings of generation too.

    Through the loader of training, whose files become the model's memory where formats agree.
    """
    config = task.trained.requested
    with quietly():
        model: Any = load_model(
            task.raw_config,
            folder,
            precision=config.precision,
            quantization=None,
            attention=task.attention,
            device="cpu",
        ).model
        found, generation = probe_logits(model, rows), getattr(model, "generation_config", None)
    for parameter in model.parameters():  # modules hold each other in circles, and would keep the weights a while
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    return found, generation


class _Made(NamedTuple):
    layers: tuple[MergedLayer, ...]
    replaced: tuple[MergedLayer, ...]


def _write_weights(task: MergeTask, draft: Path) -> _Made:
    """Write the base's files with the merged weights in them, and read them back."""
    at("merge weights")
    changes = {change.stored: change for change in task.skeleton.layers}
    made: dict[str, MergedLayer] = {}
    whole = task.skeleton.whole
    for file in task.weights.files:
        source = task.folder / file
        with safe_open(source, "pt") as opened:

            def make(name: str, opened: Any = opened) -> Tensor:
                tensor = opened.get_tensor(name)
                if name in whole:
                    merged, made[name] = replace_whole(name, whole[name], tensor)
                else:
                    merged, made[name] = _merged(task, changes[name], tensor)
                return merged

            with quietly():
                digests = write_patched(source, draft / file, {*changes, *whole}, make)
        compare_patched(source, draft / file, digests)
    return _Made(tuple(made[name] for name in changes), tuple(made[name] for name in whole))


def _merged(task: MergeTask, change: LayerChange, stored: Tensor) -> tuple[Tensor, MergedLayer]:
    config = task.trained.requested
    dtype = DTYPES[config.precision.dtype]
    return merge_layer(change, stored, quantization=config.quantization, trained_dtype=dtype)


def _write_config(task: MergeTask, draft: Path) -> None:
    """Write the base's config and index as they are, but for the name of code that is not there."""
    data = (task.folder / CONFIG).read_bytes()
    if "auto_map" in task.raw_config:
        kept = {key: value for key, value in json.loads(data).items() if key != "auto_map"}
        data = json.dumps(kept, indent=2).encode()
    write_file(draft / CONFIG, data)
    if (task.folder / INDEX).is_file() and len(task.weights.files) > 1:
        write_file(draft / INDEX, (task.folder / INDEX).read_bytes())


def _write_rest(task: MergeTask, draft: Path, check: MergeCheck) -> None:
    """Write what stands beside the weights: the tokenizer, what the model is, and its card."""
    copy_tokenizer(task.artifact, draft)
    base = task.described.base
    written = [read_safetensors_header(draft / file) for file in task.weights.files]
    entries = [tensor for header in written for tensor in header.values()]
    made = task.described.with_(
        version=__version__,
        kind="model",
        base=base.with_(id=_public_name(base.id)),
        weight_dtype=task.dtypes[0],
        adapter_dtype=None,
        num_tensors=len(entries),
        num_bytes=sum(tensor.num_bytes for tensor in entries),
    )
    write_file(draft / ARTIFACT, f"{encode_json(made)}\n".encode())
    write_file(draft / CARD, merge_card(made, check, task.final.name).encode())


def _public_name(id: str) -> str:
    """Return a base's name as others may see it: a hub id as it is, of a local folder its name alone."""
    path = Path(id).expanduser()
    return path.name if path.is_absolute() or path.exists() else id
