"""Which modules a LoRA reaches, which are trained whole, and what share of a model that is.

Names match as PEFT matches them: exactly, or as the end of a dotted module path (`q_proj`, `self_attn.q_proj`,
`layers.0.self_attn.q_proj`). Only linear layers of the decoder's stack are targets; the head never is.
"""

from collections.abc import Callable, Iterable, Sequence

from foretune.errors import ConfigError, Problem
from foretune.models.shape import OUTSIDE, ModelShape, ParameterSpec, Projection

__all__ = [
    "SCOPES",
    "adapted_params",
    "lora_parameters",
    "quantizable_params",
    "resolve_saved_modules",
    "resolve_targets",
]

SCOPES = ("all-linear", "attention", "mlp")
"""The scopes that stand for many names."""
_ATTENTION_PARENTS = frozenset({"attention", "attn", "cross_attn", "linear_attn", "self_attention", "self_attn"})
_ATTENTION_LEAVES = frozenset({"k_proj", "o_proj", "q_proj", "v_proj"})
_MLP_PARENTS = frozenset(
    {"feed_forward", "ffn", "mlp", "mlp_block", "shared_expert", "shared_experts", "shared_mlp", "fc1", "fc2"}
)
_MLP_LEAVES = frozenset({"up_proj", "down_proj", "gate_proj"})
_ROUTERS = frozenset({"router", "shared_expert_gate", "gate", "wg"})
# PEFT 0.21 refuses `out_proj` in these (tuners/tuners_utils.py, _check_lora_target_modules_mamba): the fused kernels
# of a Mamba mixer read its weight directly.
_WITHOUT_OUT_PROJ = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})


def resolve_targets(
    shape: ModelShape, targets: str | Sequence[str], modules_to_save: Sequence[str] = ()
) -> tuple[Projection, ...]:
    """Return the projections that get an adapter, each with the layers in which it does.

    `targets` is `all-linear`, `attention`, `mlp` or module names. `attention` means softmax and linear attention,
    fused or not; `mlp` the dense and shared feed-forwards. Neither reaches routers, stacked experts, state-space
    mixers or short convolutions. What `modules_to_save` trains whole gets no adapter, and neither does the `out_proj`
    of a Mamba mixer, which PEFT refuses.

    Raises ConfigError when a name, or the scope, matches nothing; the error lists what there is.
    """
    projections = tuple(p for p in _adaptable(shape) if not _is_saved(p.name, modules_to_save))
    if isinstance(targets, str) and targets in SCOPES:
        found = tuple(p for p in projections if _SCOPE_OF[targets](p.name) and p.layers != (OUTSIDE,))
        if not found:
            raise _nothing(shape, f"The scope {targets!r} matches no linear layer of {shape.id}.", None)
        return found
    names = (targets,) if isinstance(targets, str) else tuple(targets)
    if not names:
        raise _nothing(shape, "No target module is named.", None)
    hits = {name: _matching(shape, projections, name) for name in names}
    unmatched = [name for name, layers in hits.items() if not layers]
    if unmatched:
        raise ConfigError.of([_unmatched(shape, name) for name in unmatched])
    return _merged(projections, hits.values())


def _adaptable(shape: ModelShape) -> tuple[Projection, ...]:
    if shape.adaptable:
        return shape.adaptable
    if shape.model_type not in _WITHOUT_OUT_PROJ:
        return shape.projections
    return tuple(p for p in shape.projections if p.name.rpartition(".")[2] != "out_proj")


def _merged(projections: Sequence[Projection], hits: Iterable[dict[int, set[int]]]) -> tuple[Projection, ...]:
    layers: dict[int, set[int]] = {}
    for hit in hits:
        for position, found in hit.items():
            layers.setdefault(position, set()).update(found)
    return tuple(_within(projections[position], layers[position]) for position in sorted(layers))


def _within(projection: Projection, layers: set[int]) -> Projection:
    return Projection(
        name=projection.name,
        in_features=projection.in_features,
        out_features=projection.out_features,
        has_bias=projection.has_bias,
        is_quantizable=projection.is_quantizable,
        layers=tuple(sorted(layers)),
        other_names=projection.other_names,
        part_of=projection.part_of,
    )


def _matching(shape: ModelShape, projections: Sequence[Projection], name: str) -> dict[int, set[int]]:
    """Map positions in `projections` to the layers in which the full module path ends in `name`."""
    found: dict[int, set[int]] = {}
    for position, projection in enumerate(projections):
        if _ends(projection.name, name) or name.rpartition(".")[2] in projection.other_names:
            found[position] = set(projection.layers)
        elif name.endswith("." + projection.name):
            layers = {
                layer for layer in projection.layers if _ends(f"{shape.layer_prefix}{layer}.{projection.name}", name)
            }
            if layers:
                found[position] = layers
    return found


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith("." + name)


# -- scopes ------------------------------------------------------------------------------------------------------


def _is_attention(name: str) -> bool:
    *parents, leaf = name.split(".")
    if any(parent in _ATTENTION_PARENTS for parent in parents):
        return "indexer" not in parents and "compressor" not in parents
    return leaf in _ATTENTION_LEAVES and not _is_mlp(name)


def _is_mlp(name: str) -> bool:
    *parents, leaf = name.split(".")
    if leaf in _ROUTERS:
        return False
    if not parents:
        return leaf in _MLP_PARENTS
    return any(part in _MLP_PARENTS for part in parents) or (parents == ["mixer"] and leaf in _MLP_LEAVES)


_SCOPE_OF: dict[str, Callable[[str], bool]] = {
    "all-linear": lambda _name: True,
    "attention": _is_attention,
    "mlp": _is_mlp,
}


# -- modules trained whole ---------------------------------------------------------------------------------------


def resolve_saved_modules(shape: ModelShape, modules_to_save: Sequence[str]) -> tuple[ParameterSpec, ...]:
    """Return the parameters that are trained whole, under absolute names.

    On a tied model each named module becomes a trainable copy of its own, which is what PEFT makes of it: naming
    `embed_tokens` and `lm_head` counts the matrix twice. Raises ConfigError for a name that matches nothing.
    """
    named = [(_absolute(shape, layer, parameter), parameter) for layer, parameter in shape.parameters()]
    if shape.tied_embeddings:
        named.append(("lm_head.weight", _head_copy(shape)))
    problems: list[Problem] = []
    saved: dict[str, ParameterSpec] = {}
    for name in dict.fromkeys(modules_to_save):
        hits = [(full, parameter) for full, parameter in named if _is_inside(full, name)]
        if not hits:
            problems.append(_unsaved(shape, name, [full for full, _ in named]))
        for full, parameter in hits:
            saved[full] = ParameterSpec(name=full, shape=parameter.shape, role=parameter.role)
    if problems:
        raise ConfigError.of(problems)
    return tuple(saved.values())


def _absolute(shape: ModelShape, layer: int | None, parameter: ParameterSpec) -> str:
    return parameter.name if layer is None else f"{shape.layer_prefix}{layer}.{parameter.name}"


def _head_copy(shape: ModelShape) -> ParameterSpec:
    table = next(parameter for parameter in shape.before if parameter.role == "embedding")
    return ParameterSpec(name="lm_head.weight", shape=(shape.vocab_size, table.shape[1]), role="head")


def _is_inside(full_name: str, module: str) -> bool:
    """Say whether a parameter belongs to the module whose path ends in `module`."""
    parts, wanted = full_name.split("."), module.split(".")
    width = len(wanted)
    return any(parts[start : start + width] == wanted for start in range(len(parts) - width))


def _is_saved(name: str, modules_to_save: Sequence[str]) -> bool:
    return any(_is_inside(f"{name}.weight", module) for module in modules_to_save)


# -- counts ------------------------------------------------------------------------------------------------------


def lora_parameters(projections: Iterable[Projection], rank: int) -> int:
    """Count the parameters that LoRA adds and trains.

    A linear layer of shape (out, in) gains A of shape (r, in) and B of shape (out, r), so each adds r * (in + out),
    once for every layer that has it. Hu et al. 2021, section 4.1. Leaves out: biases, DoRA magnitudes and
    `modules_to_save`. In parts of one layer (litgpt) it is the same sum: each part has rows of A and of B.
    """
    return sum(rank * (p.in_features + p.out_features) * len(p.layers) for p in projections)


def adapted_params(projections: Iterable[Projection]) -> int:
    """Count the weights that have an adapter beside them; over `total_params` it is the adapted share."""
    return sum(p.in_features * p.out_features * len(p.layers) for p in projections)


def quantizable_params(shape: ModelShape) -> int:
    """Count the weights that 4-bit quantization reaches: `nn.Linear` inside layers; no Conv1D, no stacked experts.
    litgpt's head is one of them."""
    return shape.count("linear")


# -- errors ------------------------------------------------------------------------------------------------------


def _available(shape: ModelShape) -> list[str]:
    return list(dict.fromkeys(projection.name for projection in _adaptable(shape)))


def _nothing(shape: ModelShape, message: str, field: str | None) -> ConfigError:
    return ConfigError(message, hint=f"It has: {', '.join(_available(shape))}.", field=field or "lora.targets")


def _nearest(name: str, among: Iterable[str]) -> str:
    import difflib  # loaded only for the message

    leaves = {candidate.rpartition(".")[2]: candidate for candidate in among}
    near = difflib.get_close_matches(name.rpartition(".")[2], leaves, n=1, cutoff=0.6)
    return f" Nearest: {near[0]}." if near else ""


def _unmatched(shape: ModelShape, name: str) -> Problem:
    reason = ""
    if name.rpartition(".")[2] in ("lm_head", "embed_tokens"):
        reason = " (an adapter there is not supported; to train it whole, name it in modules_to_save)"
    elif name.rpartition(".")[2] == "out_proj" and shape.model_type in _WITHOUT_OUT_PROJ:
        reason = " (PEFT refuses an adapter on the out_proj of a Mamba mixer)"
    elif any(p.role == "experts" and name in p.name.split(".") for kind in shape.kinds for p in kind.parameters):
        reason = " (stacked experts are no linear layers, so no adapter fits them)"
    available = _available(shape)
    return Problem(
        f"The target {name[:60]!r} matches no linear layer of {shape.id}{reason}.",
        f"It has: {', '.join(available)}.{_nearest(name, available)}",
        None,
        "lora.targets",
    )


def _unsaved(shape: ModelShape, name: str, full_names: Sequence[str]) -> Problem:
    modules = sorted({full.rpartition(".")[0].rpartition(".")[2] for full in full_names})
    return Problem(
        f"modules_to_save names {name[:60]!r}, and {shape.id} has no such module.",
        f"It has: {', '.join(module for module in modules if not module.isdigit())}.{_nearest(name, modules)}",
        None,
        "lora.modules_to_save",
    )
