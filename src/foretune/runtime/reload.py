"""From an artifact back to a model, through the loader of training, and proof that it is the one that was saved."""

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from foretune.contract import TrainingConfig
from foretune.durable import verify_folder
from foretune.errors import RunDirectoryError, VerificationError
from foretune.evidence import ProbeCheck, RunRecord, read_record
from foretune.memory.components import Facts
from foretune.models import WeightFiles
from foretune.runtime.artifact import ADAPTER_WEIGHTS, ARTIFACT, ArtifactFacts, probe_logits, read_artifact, read_probe
from foretune.runtime.live import Live, assemble
from foretune.runtime.load import DTYPE_NAMES, load_model
from foretune.runtime.run_folder import RECORD, RunFolder

__all__ = [
    "TOLERANCES",
    "compare_probe",
    "finished_artifact",
    "finished_run",
    "generate",
    "load_adapters",
    "reload_model",
    "require_base",
]

TOLERANCES = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""How far logits of a reloaded artifact may be from the stored ones, by the dtype of the weights. On the machine and
the versions that trained it they are equal bit by bit; other kernels round otherwise."""


def finished_run(run: Path) -> tuple[RunRecord, Path, ArtifactFacts]:
    """Return the record of a run that ended well, its artifact and what that says about itself.

    Raises RunDirectoryError where there is no run, or one that did not end well; EvidenceError; SaveError where the
    artifact differs from its manifest.
    """
    if not (run / RECORD).is_file():
        what = "holds no run" if run.exists() else "does not exist"
        raise RunDirectoryError(f"{run} {what}.", hint="Name the folder that `foretune train` made.")
    return _finished(run, RunFolder(run).artifact)


def finished_artifact(place: Path) -> tuple[RunRecord, Path, ArtifactFacts]:
    """Do the same for a run's folder, or for an artifact in one: what `merge` made there has the record of its run.

    Raises as `finished_run`.
    """
    artifact = place if place.name else place.absolute()
    if (artifact / ARTIFACT).is_file() and (artifact.parent / RECORD).is_file():
        return _finished(artifact.parent, artifact)
    return finished_run(place)


def _finished(run: Path, artifact: Path | None) -> tuple[RunRecord, Path, ArtifactFacts]:
    record = read_record(run / RECORD)
    if not record.is_success or artifact is None:
        raise RunDirectoryError(
            f"The run in {run} has no artifact: its outcome is {record.outcome}.",
            hint="Name a run that ended with success, or go on with this one: `foretune train CONFIG --resume`.",
        )
    verify_folder(artifact)
    return record, artifact, read_artifact(artifact)


def require_base(weights: WeightFiles, record: RunRecord) -> None:
    """Refuse another base model than the one that was trained. Raises RunDirectoryError."""
    assert record.base is not None
    if weights.fingerprint() != record.base.weights_sha256:
        raise RunDirectoryError(
            f"The files of {record.base.id} are not those that were trained on: their hash differs from the record's.",
            hint="Use the same base: an adapter on another one is another model.",
        )


def reload_model(
    config: TrainingConfig,
    facts: Facts,
    raw_config: dict[str, Any],
    folder: Path,
    artifact: Path,
    described: ArtifactFacts,
) -> Live:
    """Load base and adapters, or the whole model, as training did; `folder` has the weights and `raw_config`.

    Raises VerificationError where it is another class, or where adapters do not fit.
    """
    loaded = load_model(
        raw_config,
        folder,
        precision=config.precision,
        quantization=config.quantization,
        attention=config.attention,
        device=config.device,
    )
    found = type(loaded.model).__name__
    if found != described.base.model_class:
        raise VerificationError(f"The artifact was trained as {described.base.model_class}, and {found} was loaded.")
    live = assemble(loaded.model, config, facts, {})
    if described.kind == "adapter":
        load_adapters(live.model, load_file(artifact / ADAPTER_WEIGHTS))
    live.step.eval()
    return live


def load_adapters(model: nn.Module, stored: dict[str, Tensor]) -> None:
    """Give a model with adapters those of an artifact. Raises VerificationError where they do not fit."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
    if set(stored) != set(wanted):
        odd = sorted(set(stored) ^ set(wanted))
        raise VerificationError(f"The adapters do not fit the base: {odd[0]} and {len(odd) - 1:,} more names differ.")
    set_peft_model_state_dict(model, stored)
    now = get_peft_model_state_dict(model, save_embedding_layers=False)
    changed = [name for name, tensor in stored.items() if not torch.equal(now[name].cpu(), tensor)]
    if changed:
        raise VerificationError(f"The adapters were not taken as they are: {changed[0]} differs after loading.")


def compare_probe(live: Live, artifact: Path, described: ArtifactFacts) -> ProbeCheck:
    """Compare logits with those that the run stored. Raises VerificationError beyond the tolerance of the dtype."""
    rows, stored = read_probe(artifact)
    found = probe_logits(live.model, rows)
    difference = max(float((one - other).abs().max()) for one, other in zip(found, stored, strict=True))
    coarsest = max((described.weight_dtype, live.config.precision.dtype), key=lambda name: TOLERANCES[name])
    tolerance = TOLERANCES[coarsest]
    if not difference <= tolerance:
        raise VerificationError(
            f"The reloaded artifact gives other logits than the run stored: they differ by {difference:.3g}, and "
            f"{tolerance:g} is the most for {coarsest}.",
            hint="Its files, the base's or the libraries are not those of the run.",
        )
    adapters = {DTYPE_NAMES[each.dtype] for name, each in live.trained.items() if ".lora_" in name}
    return ProbeCheck(
        max_abs_difference=difference,
        tolerance=tolerance,
        adapter_dtype=", ".join(sorted(adapters)) or None,
        is_bitwise_equal=all(torch.equal(one, other) for one, other in zip(found, stored, strict=True)),
    )


def generate(
    live: Live, prompt_ids: list[int], described: ArtifactFacts, *, max_new_tokens: int
) -> tuple[list[int], Literal["stop", "length"]]:
    """Go on with one prompt, the likeliest token each time, until a stop token or a number of tokens."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(described.stop_ids),
        pad_token_id=described.pad.id,
        use_cache=True,
    )
    ids = torch.tensor([prompt_ids], device=live.device)
    model: Any = live.model
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    made = out[0, len(prompt_ids) :].tolist()
    if made and made[-1] in described.stop_ids:
        return made[:-1], "stop"
    return made, "length"
