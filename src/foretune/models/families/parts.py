"""The words in which a family writes down its module tree.

Each word returns the parameters of one module in the order in which torch registers them; a layer is their sum, in
the order in which Transformers' `__init__` creates the modules (own parameters of a module come before its children's).
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

from foretune.models.families.fields import Fields
from foretune.models.shape import DecoderTraits, LayerKind, ParameterRole, ParameterSpec, Tower

__all__ = [
    "Decoder",
    "Heads",
    "Params",
    "Whole",
    "attention",
    "conv1d",
    "decoder",
    "embedding",
    "experts",
    "frozen",
    "gated_mlp",
    "heads",
    "linear",
    "norm",
    "num_elements",
    "outside",
    "plain",
    "rotary_dim",
    "rotary_type",
    "stack",
    "two_layer_mlp",
    "under",
]

Params = tuple[ParameterSpec, ...]
Key = TypeVar("Key", bound=Hashable)


def plain(name: str, *shape: int, role: ParameterRole = "other") -> Params:
    """A bare `nn.Parameter`, or the weight of a module that is none of the others (convolution, router, gate)."""
    return (ParameterSpec(name=name, shape=shape, role=role),)


def frozen(params: Params) -> Params:
    """The same parameters, which the class leaves out of training."""
    return tuple(p.with_(is_frozen=True) for p in params)


def linear(name: str, out_features: int, in_features: int, bias: bool = False) -> Params:
    """An `nn.Linear`: weight (out, in) and, where there is one, a bias."""
    weight = plain(f"{name}.weight", out_features, in_features, role="linear")
    return weight + plain(f"{name}.bias", out_features, role="bias") if bias else weight


def conv1d(name: str, in_features: int, out_features: int) -> Params:
    """GPT-2's `Conv1D`: a transposed weight (in, out) and a bias (transformers/pytorch_utils.py)."""
    weight = plain(f"{name}.weight", in_features, out_features, role="conv1d")
    return weight + plain(f"{name}.bias", out_features, role="bias")


def norm(name: str, *width: int, bias: bool = False) -> Params:
    """An RMSNorm (weight) or a LayerNorm (weight and bias)."""
    weight = plain(f"{name}.weight", *width, role="norm")
    return weight + plain(f"{name}.bias", *width, role="norm") if bias else weight


def embedding(name: str, rows: int, width: int) -> Params:
    """An `nn.Embedding`."""
    return plain(f"{name}.weight", rows, width, role="embedding")


def experts(name: str, count: int, hidden: int, width: int) -> Params:
    """Stacked gated experts as [E, out, in], what Transformers 5 makes of Mixtral, Qwen, DeepSeek, Granite, Jamba."""
    gate_up = plain(f"{name}.gate_up_proj", count, 2 * width, hidden, role="experts")
    return gate_up + plain(f"{name}.down_proj", count, hidden, width, role="experts")


def under(prefix: str, params: Params) -> Params:
    """The same parameters one module deeper."""
    return tuple(p.with_(name=f"{prefix}.{p.name}") for p in params)


def outside(params: Params) -> Params:
    """Linear layers that stand outside the stack, or whose class is one over `nn.Linear` with a forward of its own:
    not adapted and not quantized by foretune, so `other`."""
    roles: dict[ParameterRole, ParameterRole] = {"linear": "other", "bias": "other"}
    return tuple(p.with_(role=roles.get(p.role, p.role)) for p in params)


def num_elements(params: Params) -> int:
    """Count the elements of some parameters."""
    return sum(parameter.num_elements for parameter in params)


# -- attention and feed-forward ----------------------------------------------------------------------------------


class Heads(NamedTuple):
    """Query heads, key/value heads and the width of one head."""

    query: int
    kv: int
    dim: int

    @property
    def query_width(self) -> int:
        """Width of all queries together."""
        return self.query * self.dim

    @property
    def kv_width(self) -> int:
        """Width of all keys, or of all values."""
        return self.kv * self.dim


def heads(c: Fields, *, stated_dim: bool = True, kv_key: str = "num_key_value_heads") -> Heads:
    """Read the heads: null key/value heads mean as many as queries, a missing head width means hidden / heads.

    `stated_dim=False` for classes that ignore a `head_dim` in the config (Falcon, GPT-NeoX, StableLM).
    """
    query_key = c.own_name("num_attention_heads")
    hidden_key = c.own_name("hidden_size")
    query = c.size(query_key)
    kv = c.maybe_size(kv_key) or query
    dim = c.maybe_size("head_dim") if stated_dim else None
    if dim is None:
        dim = c.size(hidden_key) // query
        if dim == 0:
            raise c.error(query_key, query, f"more heads than {hidden_key} has columns", "Check the config.")
    return Heads(query, kv, dim)


def attention(
    c: Fields,
    h: Heads,
    *,
    bias: bool = False,
    out_bias: bool | None = None,
    name: str = "self_attn",
    out: str = "o_proj",
) -> Params:
    """Separate q, k, v and output projections, as in Llama."""
    hidden = c.size(c.own_name("hidden_size"))
    return (
        *linear(f"{name}.q_proj", h.query_width, hidden, bias),
        *linear(f"{name}.k_proj", h.kv_width, hidden, bias),
        *linear(f"{name}.v_proj", h.kv_width, hidden, bias),
        *linear(f"{name}.{out}", hidden, h.query_width, bias if out_bias is None else out_bias),
    )


def gated_mlp(name: str, hidden: int, width: int, bias: bool = False) -> Params:
    """gate_proj, up_proj and down_proj."""
    return (
        *linear(f"{name}.gate_proj", width, hidden, bias),
        *linear(f"{name}.up_proj", width, hidden, bias),
        *linear(f"{name}.down_proj", hidden, width, bias),
    )


def two_layer_mlp(up: str, down: str, hidden: int, width: int, bias: bool = False) -> Params:
    """An MLP without a gate."""
    return linear(up, width, hidden, bias) + linear(down, hidden, width, bias)


def rotary_dim(c: Fields, head_dim: int, default: float = 1.0) -> int:
    """Width of the rotated part of a head: head width times `partial_rotary_factor`, truncated."""
    key, value = "partial_rotary_factor", c.raw("partial_rotary_factor")
    for section_key in ("rope_parameters", "rope_scaling"):
        section = c.raw(section_key)
        if value is None and isinstance(section, dict):
            key, value = f"{section_key}.partial_rotary_factor", section.get("partial_rotary_factor")
    if value is None:
        return int(head_dim * default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise c.error(key, value, "not a share from 0 to 1", "Write for example 0.5.")
    return int(head_dim * value)


def rotary_type(c: Fields) -> str:
    """The kind of rotary frequencies: `default`, `linear`, `yarn`, `longrope` (Phi-3 wrote `su`)."""
    for key in ("rope_parameters", "rope_scaling"):
        section = c.raw(key)
        if isinstance(section, dict):
            kind = section.get("rope_type", section.get("type"))
            if isinstance(kind, str):
                return kind
    return "default"


# -- the whole decoder -------------------------------------------------------------------------------------------


class Decoder(NamedTuple):
    """A language model as its family writes it; `families.shape_from_config` makes a ModelShape of it."""

    vocab_size: int
    num_layers: int
    max_positions: int | None
    tied: bool
    traits: DecoderTraits
    prefix: str
    before: Params
    kinds: tuple[LayerKind, ...]
    after: Params
    notes: tuple[str, ...] = ()

    def moved(self, old: str, new: str) -> "Decoder":
        """The same model with its modules under another name (`model.` -> `model.language_model.`)."""

        def renamed(params: Params) -> Params:
            return tuple(p.with_(name=new + p.name.removeprefix(old)) if p.name.startswith(old) else p for p in params)

        prefix = new + self.prefix.removeprefix(old)
        return self._replace(prefix=prefix, before=renamed(self.before), after=renamed(self.after))


class Whole(NamedTuple):
    """A language model and the number of parameters outside it."""

    model_type: str
    decoder: Decoder
    tower_params: int
    notes: tuple[str, ...]
    outer_type: str | None = None
    loads_text_alone: bool = False
    towers: tuple[Tower, ...] = ()


def stack(keys: Sequence[Key], layer: Callable[[Key], Params]) -> tuple[LayerKind, ...]:
    """Build one LayerKind for each distinct key, `keys` holding one for each layer; equal kinds are merged."""
    members: dict[Key, list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(key, []).append(index)
    by_content: dict[Params, list[int]] = {}
    for key, layers in members.items():
        by_content.setdefault(tuple(layer(key)), []).extend(layers)
    return tuple(LayerKind(layers=tuple(sorted(layers)), parameters=params) for params, layers in by_content.items())


def decoder(
    c: Fields,
    kinds: tuple[LayerKind, ...],
    traits: DecoderTraits,
    *,
    final: Params,
    embed: str = "model.embed_tokens",
    embed_width: int | None = None,
    before: Params = (),
    after: Params = (),
    prefix: str = "model.layers.",
    head_bias: bool = False,
    tied: bool | None = None,
    positions: str = "max_position_embeddings",
    notes: tuple[str, ...] = (),
) -> Decoder:
    """Put embedding, layers, last norm and head together.

    A tied head has no weight of its own; its bias, where there is one, stays. `before` follows the embedding,
    `after` the last norm.
    """
    vocab = c.size("vocab_size")
    width = embed_width or traits.hidden_size
    is_tied = c.flag("tie_word_embeddings") if tied is None else tied
    head: Params = () if is_tied else plain("lm_head.weight", vocab, width, role="head")
    if head_bias:
        head += plain("lm_head.bias", vocab, role="head")
    return Decoder(
        vocab_size=vocab,
        num_layers=sum(len(kind.layers) for kind in kinds),
        max_positions=c.maybe_size(c.own_name(positions)),
        tied=is_tied,
        traits=traits,
        prefix=prefix,
        before=embedding(embed, vocab, width) + before,
        kinds=kinds,
        after=final + after + head,
        notes=notes,
    )
