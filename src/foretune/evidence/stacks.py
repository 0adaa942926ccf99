"""Which stack profile a row ran on, and what about it that profile does not describe.

A profile is found by driver, platform and versions alone, never by the source of a measurement. Where none describes a
row the nearest is taken and the row is foreign: it is predicted and summed apart.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from foretune.evidence.observations import UNKNOWN, Observation
from foretune.memory import (
    FORETUNE,
    LITGPT_0_2,
    LITGPT_0_4,
    MANUAL_LOOP,
    PROFILES,
    TRAINER,
    TRAINER_4_36,
    TRL,
    StackProfile,
)

__all__ = ["EngineName", "StackChoice", "choose_stack"]

EngineName = Literal["estimated", "traced"]


class StackChoice(NamedTuple):
    """A profile, and what of the row it does not describe."""

    profile: StackProfile
    foreign_because: tuple[str, ...]

    @property
    def is_foreign(self) -> bool:
        """Whether the profile is only the nearest."""
        return bool(self.foreign_because)


class _Known(NamedTuple):
    """A driver on a platform with a release of Transformers, and its profile. None: any."""

    driver: str
    profile: StackProfile
    os: Literal["linux", "windows"] | None = None
    transformers: str | None = None
    peft: tuple[str, ...] = ()
    """Releases beside the profile's that are the same to it."""
    torch: str | None = None


_FORETUNE_5_17 = FORETUNE.with_(name="foretune-5.17", torch="2.11", transformers="5.17", rotary_by_product=True)
"""Foretune's own loop on libraries before its own: until 5.24 Transformers made rotary angles by a matrix product."""

_KNOWN = (
    _Known("foretune", _FORETUNE_5_17, os="linux", transformers="5.17"),
    _Known("foretune", FORETUNE, os="linux"),
    _Known("manual_loop", PROFILES["manual-loop-windows"], os="windows"),
    _Known("manual_loop", PROFILES["manual-loop-5.0"], transformers="5.0"),
    _Known("manual_loop", MANUAL_LOOP),
    _Known("fms_hf_tuning", PROFILES["fms-4.45"], transformers="4.45", peft=("0.12",)),
    _Known("fms_hf_tuning", PROFILES["fms-4.48"], transformers="4.48", peft=("0.12",)),
    _Known("litgpt", LITGPT_0_2, os="linux", torch="2.1"),
    _Known("litgpt", LITGPT_0_4, os="linux"),
    _Known("ms_swift", TRAINER_4_36, os="linux"),
    _Known("qwen_finetune", TRAINER_4_36, os="linux"),
    _Known("hf_trainer", TRAINER, os="linux"),
    _Known("trl", TRL, os="linux", transformers="5.24"),
    _Known("trl", TRAINER, os="linux"),
)
"""The first that agrees with a row is its profile."""

_TRAINERS = frozenset({"axolotl", "hf_trainer", "llama_factory", "ms_swift", "qwen_finetune", "trl", "unsloth"})
"""Drivers that are Transformers' Trainer underneath."""
_WITHOUT_AUTOCAST: dict[str, Any] = {"autocast": "none", "converts_outputs": False}
_FUSED = {"fast_rmsnorm": "rmsnorm", "fast_rope": "rope", "fused_lora": "lora"}
_LOSS_KERNELS = {"triton_ce": "triton", "liger_fused_linear_ce": "liger"}

_OWN_LOOPS = frozenset({"foretune", "litgpt", "torchtune", "torchtitan", "torchao_benchmark", "fsdp_qlora"})
"""Drivers with models or losses of their own; all others run Transformers' classes and their loss."""
_LOGITS_NEVER_WHOLE = frozenset({"liger_fused", "cut_cross_entropy"})
_VERSIONED = ("torch", "transformers", "peft", "bitsandbytes")


def choose_stack(row: Observation) -> StackChoice:
    """Return the profile of a row's driver, platform and versions, or the nearest one."""
    software = row.software
    for known in _KNOWN:
        is_driver = known.driver == software.driver and known.os in (None, software.os)
        is_release = known.torch in (None, _release(software.torch))
        if is_driver and is_release and known.transformers in (None, _release(software.transformers)):
            profile = _as_called(row, known.profile)
            because = [*_other_versions(row, profile, known.peft)]
            break
    else:
        profile, because = _nearest(row), [f"no profile describes the driver {software.driver}"]
    if row.training.loss in _LOGITS_NEVER_WHOLE and profile.loss_kernel == "none":
        profile = FORETUNE  # the only one with a loss in chunks
    return StackChoice(profile, (*because, *_other_program(row, profile)))


def _as_called(row: Observation, profile: StackProfile) -> StackProfile:
    """Return the profile with what a driver leaves to its caller: autocast, kernels, k-bit preparation."""
    training, kernels = row.training, row.software.kernels
    if profile.loss in ("own", "litgpt"):
        return profile  # our own loop and litgpt's leave nothing to their caller
    if profile.name.startswith("manual-loop"):
        return profile.with_(autocast=training.autocast) if training.autocast in ("bf16", "fp16") else profile
    changes: dict[str, Any] = {"fused": tuple(name for kernel, name in _FUSED.items() if kernel in kernels)}
    for kernel, name in _LOSS_KERNELS.items():
        changes |= {"loss_kernel": name} if kernel in kernels else {}
    if profile.splits_decay:
        changes |= _WITHOUT_AUTOCAST if training.autocast == "none" else {}
        changes |= {"kbit_upcast": "none"} if training.kbit_upcast is False else {}
        changes |= {"checkpoint_form": "reentrant"} if training.gradient_checkpointing == "reentrant" else {}
    if training.autocast in ("bf16", "fp16"):
        changes |= {"autocast": training.autocast, "converts_outputs": True}
    if training.quantization != "none" and training.fp32_modules == ("norms",):
        changes["kbit_upcast"] = "norms"
    return profile.with_(**changes)


def _nearest(row: Observation) -> StackProfile:
    """Foretune's own loop for drivers with a loss of their own, Trainer where it is underneath, and a plain loop around
    Transformers for the others."""
    if row.software.driver in _OWN_LOOPS:
        return FORETUNE
    if row.software.driver in _TRAINERS and row.software.os != "windows":
        return _as_called(row, TRAINER)
    return PROFILES["manual-loop-windows"] if row.software.os == "windows" else MANUAL_LOOP


def _other_versions(row: Observation, profile: StackProfile, peft: tuple[str, ...]) -> Iterator[str]:
    """Name libraries whose release is another than the profile's; what is not stated is taken to agree.

    Transformers, whose loop and loader the profile is about, must be stated; for litgpt torch, which tells its time.
    """
    needed = "transformers" if profile.model_code == "transformers" else "torch"
    if getattr(row.software, needed) is None:
        yield f"its version of {needed} is not stated"
    for library in _VERSIONED:
        stated, described = getattr(row.software, library), getattr(profile, library)
        same = (described, *peft) if library == "peft" else (described,)
        if stated is not None and _release(stated) not in same:
            yield f"{library} {stated}, not {described}"


def _release(version: str | None) -> str | None:
    """Return major and minor: `2.10` of `2.10.0+cu128`."""
    return None if version is None else ".".join(version.split("+")[0].split(".")[:2])


def _other_program(row: Observation, profile: StackProfile) -> Iterator[str]:
    """Name what no profile has a field for, where a row has it."""
    training, software = row.training, row.software
    if training.autocast not in (profile.autocast, UNKNOWN):
        yield f"autocast to {training.autocast}"
    if training.gradient_checkpointing == "reentrant" and profile.checkpoint_form != "reentrant":
        yield "reentrant checkpointing"
    if software.compile:
        yield "torch.compile"
    described = [*(k for k, name in _FUSED.items() if name in profile.fused)]
    described += [k for k, name in _LOSS_KERNELS.items() if name == profile.loss_kernel]
    unknown = [kernel for kernel in software.kernels if kernel not in described]
    if unknown:
        yield f"kernels: {', '.join(unknown)}"
    upcasts = profile.kbit_upcast == "all"
    if training.quantization != "none" and training.kbit_upcast not in (None, upcasts):
        yield "embeddings, norms and head have another format than the profile's"
