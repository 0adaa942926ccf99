"""The components of the allocated peak, each with its formula.

The figures are sums over the storages that are alive at the peak; the formulas say how they come about. A test holds
each formula against the figures.
"""

from collections.abc import Callable
from typing import NamedTuple

from foretune.contract import TrainingConfig
from foretune.memory.allocator import Program
from foretune.memory.answer import Component
from foretune.memory.kernels import chunk_tokens
from foretune.models import ModelShape, Projection

__all__ = ["COMPONENT_ORDER", "Facts", "components_at", "describe_components"]

COMPONENT_ORDER = (
    "weights",
    "adapters",
    "gradients",
    "optimizer states",
    "activations",
    "logits and loss",
    "workspaces",
    "allocator slack",
)
ITEM = {"bf16": 2, "fp16": 2, "fp32": 4}


class Facts(NamedTuple):
    """What the formulas are made of."""

    config: TrainingConfig
    shape: ModelShape
    adapted: tuple[Projection, ...]
    trainable_params: int
    quantized_params: int
    magnitudes: int = 0
    """DoRA's: one for each row of an adapted layer."""
    whole_params: int = 0
    """Parameters of modules that are trained whole beside adapters."""

    @property
    def tokens(self) -> int:
        """T = B * S."""
        return self.config.batch.micro_batch_size * self.config.batch.sequence_length

    @property
    def trained_item_bytes(self) -> int:
        """Item size of a trained parameter, which its gradient and AdamW's states share."""
        lora = self.config.lora is not None
        return ITEM[self.config.precision.adapter_dtype if lora else self.config.precision.dtype]


Inputs = dict[str, int]


def weights(facts: Facts) -> Inputs:
    """Base weights as they lie on the device.

    Formula: s*(P - Q) + Q/2 + Q/64, on a GPU each tensor rounded up to 512 B. P: parameters; Q: those that 4-bit
    reaches; s: bytes of one. Q/64 are the scales: one byte for 64 weights with double quantization (without it Q/16,
    4 bytes).
    An 8-bit base has Q and 4 bytes for each row of a weight instead of Q/2 + Q/64.
    Source: Dettmers et al. 2023 (QLoRA), section 3; bitsandbytes/functional.py, quantize_4bit.
    """
    item = ITEM[facts.config.precision.dtype]
    return {"P": facts.shape.loaded_params, "Q": facts.quantized_params, "s": item}


def adapters(facts: Facts) -> Inputs:
    """The matrices A and B of each adapted layer; DoRA's magnitudes; copies of modules that are trained whole.

    Formula: s*r*(sum of in + out over the adapted layers), with DoRA s*m more, and t*M for modules trained whole, whose
    originals stay. r: rank; s: bytes of one; m: outputs of the adapted layers; M: parameters of those modules;
    t: bytes of one, which are the base's.
    Source: Hu et al. 2021 (LoRA), section 4.1; PEFT keeps adapters in fp32 (autocast_adapter_dtype), and copies modules
    as they are (peft/utils/other.py, ModulesToSaveWrapper).
    """
    lora = facts.config.lora
    width = sum((p.in_features + p.out_features) * len(p.layers) for p in facts.adapted)
    item = ITEM[facts.config.precision.adapter_dtype]
    inputs = {"r": lora.rank if lora else 0, "sum of in + out": width if lora else 0, "s": item}
    if facts.magnitudes:
        inputs["m"] = facts.magnitudes
    if facts.whole_params:
        inputs |= {"M": facts.whole_params, "t": ITEM[facts.config.precision.dtype]}
    return inputs


def gradients(facts: Facts) -> Inputs:
    """Gradients that are alive at the peak.

    Formula: at most s*G, once backward has ended. G: trained parameters; s: bytes of one (of a module trained whole
    the base's). In backward they appear layer by layer, so at a peak in its first layers there are few.
    Source: torch/csrc/autograd/functions/accumulate_grad.h.
    """
    return {"G": facts.trainable_params, "s": facts.trained_item_bytes}


def optimizer_states(facts: Facts) -> Inputs:
    """What the optimizer keeps for each trained parameter, and its temporaries where they are alive at the peak.

    Formula: k*s*G, and for the foreach kernel s*G more during its step. k: states (AdamW 2, SGD with momentum 1,
    SGD 0); s: bytes of one (1 for the 8-bit optimizers, with 8 B of scales for 256); G: trained parameters.
    Source: torch/optim/adam.py; bitsandbytes/optim/optimizer.py.
    """
    settings = facts.config.optimizer
    states = 2 if settings.name != "sgd" else int(settings.momentum > 0)
    item = 1 if settings.name.endswith("8bit") else facts.trained_item_bytes
    return {"k": states, "s": item, "G": facts.trainable_params}


def activations(facts: Facts) -> Inputs:
    """What forward keeps for backward, and what one layer holds while it runs.

    Formula: with gradient checkpointing L*T*h*s plus one layer's own tensors; without, every layer's own tensors.
    L: layers; T: tokens in the batch; h: hidden width; s: bytes of one. A layer's own tensors come from its forward
    on the tape (operations table).
    Source: Chen et al. 2016 (checkpointing); torch/utils/checkpoint.py; the model's file in Transformers.
    """
    item = ITEM[facts.config.precision.dtype]
    return {
        "L": facts.shape.num_layers,
        "T": facts.tokens,
        "h": facts.shape.traits.hidden_size,
        "s": item,
        "checkpointed": int(facts.config.gradient_checkpointing),
    }


def logits_and_loss(facts: Facts) -> Inputs:
    """Logits, their log-probabilities and their gradients, as far as they are alive at the peak.

    Formula: stock loss up to 12*T*V: fp32 log-probabilities, the gradient of the loss and that of the logits, 4 B
    each; in forward s + 4 + 4. Chunked loss: the same with c for T. T: tokens; V: vocabulary; c: tokens of a chunk.
    Source: aten/src/ATen/native/LossNLL.cpp, SoftMax.cu; foretune/memory/head.py.
    """
    chunked = facts.config.loss == "chunked"
    return {
        "T": facts.tokens,
        "V": facts.shape.vocab_size,
        "c": chunk_tokens(facts.tokens) if chunked else facts.tokens,
    }


def workspaces(facts: Facts) -> Inputs:
    """Buffers that cuBLAS and cublasLt keep for each thread that multiplies.

    Formula: 2 * 8.125 MiB for cuBLAS (forward and autograd threads); 1 MiB each for cublasLt once a linear has a bias.
    Source: aten/src/ATen/cuda/CublasHandlePool.cpp (getChosenWorkspaceSize).
    """
    return {"threads": 2}


def allocator_slack(facts: Facts) -> Inputs:
    """What blocks hold beyond the requests they serve.

    Formula: allocated minus the sum of rounded requests: a block's rest below 1 MiB is not split off.
    Source: c10/cuda/CUDACachingAllocator.cpp (should_split).
    """
    return {}


FORMULAS: dict[str, Callable[[Facts], Inputs]] = {
    "weights": weights,
    "adapters": adapters,
    "gradients": gradients,
    "optimizer states": optimizer_states,
    "activations": activations,
    "logits and loss": logits_and_loss,
    "workspaces": workspaces,
    "allocator slack": allocator_slack,
}


def components_at(program: Program, position: int, allocated_bytes: int) -> dict[str, int]:
    """Sum what is alive at an event of the program by component; what blocks hold beyond that is the slack."""
    before = program.events[: position + 1]
    dead = {slot for slot, size in before if size == 0}
    sums = dict.fromkeys(COMPONENT_ORDER, 0)
    components, total = program.components, 0
    for slot, size in before:
        if size > 0 and slot not in dead:
            sums[components[slot]] += size
            total += size
    sums["allocator slack"] = allocated_bytes - total
    return sums


def describe_components(sums: dict[str, int], facts: Facts) -> tuple[Component, ...]:
    """Attach to each component its formula, inputs and source, read off the docstrings above."""
    out = []
    for name in COMPONENT_ORDER:
        function = FORMULAS[name]
        formula, source = _sections(function.__doc__ or "")
        inputs = tuple(function(facts).items())
        out.append(Component(name=name, num_bytes=sums[name], formula=formula, inputs=inputs, source=source))  # type: ignore[arg-type]
    return tuple(out)


def _sections(docstring: str) -> tuple[str, str]:
    """Return the texts after `Formula:` and `Source:`."""
    text = " ".join(docstring.split())
    formula, _, source = text.partition("Formula: ")[2].partition(" Source: ")
    return formula, source
