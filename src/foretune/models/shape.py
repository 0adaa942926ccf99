"""What a model is made of: every parameter by name and shape, and the numbers its layers are written from.

`ModelShape` lists parameters once for each kind of layer, in the order in which the model's modules hold them, under
the names Transformers gives them. Counts, LoRA targets, the quantizable share and the order of loading all follow
from that one list.
"""

from collections.abc import Iterator
from math import prod
from typing import Annotated, Literal

from msgspec import Meta

from foretune.values import Value

__all__ = [
    "OUTSIDE",
    "BufferSpec",
    "DecoderTraits",
    "LayerKind",
    "ModelShape",
    "ParameterSpec",
    "Projection",
    "Tower",
]

OUTSIDE = -1
"""The layer of a projection that stands outside the stack: litgpt's head."""

Size = Annotated[int, Meta(ge=0, lt=1 << 62)]
_WITHOUT_SDPA = frozenset(
    {"bloom", "gemma2", "gpt_neo", "gpt_oss", "granite_swa", "mamba2", "mimo_v2_flash", "mpt", "vaultgemma", "xglm"}
)
"""Classes of transformers 5.24 without `_supports_sdpa`."""
ParameterRole = Literal["linear", "bias", "conv1d", "embedding", "head", "norm", "experts", "other"]


class ParameterSpec(Value, frozen=True, kw_only=True):
    """One parameter tensor."""

    name: str
    """Inside a layer relative to it (`self_attn.q_proj.weight`), outside absolute (`model.norm.weight`)."""
    shape: tuple[Size, ...]
    """As torch holds it: a linear weight is (out, in), GPT-2's Conv1D (in, out), stacked experts are 3-D."""
    role: ParameterRole
    """`linear`: weight of an `nn.Linear` in a layer (4-bit and LoRA reach it). `bias`: bias of such a linear or conv1d.
    `conv1d`: transposed weight of a GPT-2 style Conv1D (LoRA reaches it, 4-bit does not). `experts`: stacked 3-D
    weights (neither reaches them). `head`: an untied output head. `other`: routers, convolutions, gates, tables."""
    is_frozen: bool = False
    """The class itself leaves it out of training (`requires_grad=False`)."""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class LayerKind(Value, frozen=True, kw_only=True):
    """Layers that hold the same parameters."""

    layers: tuple[int, ...]
    """Indices of these layers in the stack, rising."""
    parameters: tuple[ParameterSpec, ...]
    """In module order, names relative to the layer."""

    @property
    def num_parameters(self) -> int:
        """Parameters of one such layer."""
        return sum(parameter.num_elements for parameter in self.parameters)


class Projection(Value, frozen=True, kw_only=True):
    """A linear layer that occurs in the model's stack, as LoRA sees it."""

    name: str
    """Relative to the layer: `self_attn.q_proj`."""
    in_features: Size
    out_features: Size
    has_bias: bool
    is_quantizable: bool
    """An `nn.Linear`; GPT-2's Conv1D is not."""
    layers: tuple[int, ...]
    """The layers that have it."""
    other_names: tuple[str, ...] = ()
    """Names under which it can be targeted too (litgpt's parts, by what Transformers calls them)."""
    part_of: str | None = None
    """The linear layer that holds it, where it is a part of one; the adapters of its parts are one pair of matrices."""


class DecoderTraits(Value, frozen=True, kw_only=True):
    """The numbers and switches from which the layers of a decoder are written; None where a family has none."""

    hidden_size: Size
    num_heads: Size | None = None
    num_kv_heads: Size | None = None
    head_dim: Size | None = None
    value_head_dim: Size | None = None
    """Width of a head of values in latent attention, whose keys may be wider."""
    intermediate_size: Size | None = None
    activation: str | None = None
    """As in the config: `silu`, `gelu_pytorch_tanh`, `gelu_new`, `relu`..."""
    rotary_dim: Size | None = None
    """Width of the rotated part of a head; None: no rotary embedding."""
    global_rotary_dim: Size | None = None
    """The same in layers without a window, where it is another one (Gemma 4)."""
    has_long_rope: bool = False
    """Rotary frequencies are chosen by the length of the sequence (longrope)."""
    rotary_layers: tuple[bool, ...] = ()
    """Where some layers go without rotary embedding (SmolLM3, Cohere2): True for the layers that have it."""
    rotary_bases: tuple[float, ...] = ()
    """Base of each layer's rotary embedding, where the config states them; 0: none (Granite SWA)."""
    sliding_window: Size | None = None
    sliding_layers: tuple[bool, ...] = ()
    """For each layer whether it attends only within the window; empty: none does."""
    tunes_temperature: bool = False
    """Layers without rotary embedding scale their queries by position (Llama 4)."""
    attention_softcap: float | None = None
    final_softcap: float | None = None
    logits_factor: float | None = None
    """Number by which the class multiplies or divides its logits (Granite, Cohere); None: it does neither."""
    qk_norm: Literal["head", "full"] | None = None
    """Norm on queries and keys: over each head, or over the whole projection (OLMo2)."""
    unwritten: tuple[str, ...] = ()
    """Settings of the config whose effect on memory has no program; the trace runs them."""
    has_parallel_residual: bool = False
    """Attention and MLP read the same input and are added together (GPT-NeoX, Falcon)."""
    table_positions: Size | None = None
    """Number of positions for which the class keeps or builds a table: a causal mask (GPT-BigCode; GPT-Neo, in each
    layer), sines (GPT-J, CodeGen, XGLM), linear biases (MPT)."""
    clips_projections: bool = False
    """Queries, keys and values are clamped (OLMo's and MPT's clip_qkv)."""
    has_grouped_projection: bool = False
    """The fused projection holds each group's queries, key and value together (Falcon's `new_decoder_architecture`)."""
    num_experts: Size | None = None
    experts_per_token: Size | None = None
    normalizes_experts: bool = False
    """The weights of a token's experts are divided by their sum."""
    expert_groups: Size | None = None
    """Groups that experts are chosen from (DeepSeek: `n_group`)."""
    expert_groups_per_token: Size | None = None
    embedding_dropout: float = 0.0
    """Dropout that the config itself asks for in training (GPT-2: 0.1), apart from LoRA's."""
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    index_topk: Size | None = None
    """Tokens that an indexer chooses for each query (DeepSeek V3.2)."""
    sparse_layers: tuple[bool, ...] = ()
    """For each layer whether only the largest of its MLP's activations are kept (Gemma 3n); empty: none is so."""
    has_expert_bias: bool = False
    """A correction is added to the scores by which LFM2 chooses experts."""
    mixer_groups: Size | None = None
    """Groups of heads that share B and C in a Mamba 2 mixer; key heads of a gated delta net."""
    mixer_width: Size | None = None
    """Width of all heads of a Mamba 2 mixer together."""
    mixer_projection: Size | None = None
    """Width of a Mamba 2 mixer's input projection."""
    residual_in_32bit: bool = False
    """The residual stream is fp32 whatever the weights are (Mamba 2)."""
    norms_before_gate: bool = False
    """A Mamba 2 mixer's norm comes before its gate (Falcon H1)."""
    mixer_chunk: Size | None = None
    """Tokens of one chunk of a Mamba 2 mixer's scan, or of a block of lightning attention."""
    flags: tuple[str, ...] = ()
    """Switches of one family alone that are on, by their keys in the config."""
    activation_dropout: float = 0.0
    """Dropout between the MLP's layers (XGLM)."""
    keeps_normed_residual: bool = False
    """The residual is what the norm gives (Bloom's `apply_residual_connection_post_layernorm`)."""
    has_final_norm: bool = True
    """A norm stands after the last layer (not in every OPT)."""
    norms_last: bool = False
    """Norms stand after attention and MLP instead of before (OPT without `do_layer_norm_before`)."""


class BufferSpec(Value, frozen=True, kw_only=True):
    """One tensor that a module holds beside its parameters, on the device too."""

    name: str
    shape: tuple[Size, ...]
    dtype: Literal["model", "fp32", "int64"] = "model"
    """`model`: the dtype that the model is loaded in."""


class Tower(Value, frozen=True, kw_only=True):
    """A part beside the language model, under absolute names: its weights are loaded and not trained."""

    parameters: tuple[ParameterSpec, ...]
    """In module order; a `linear` stands below a numbered layer, where 4-bit reaches it."""
    buffers: tuple[BufferSpec, ...] = ()
    is_before: bool = True
    """Its modules come before the language model's."""


class ModelShape(Value, frozen=True, kw_only=True):
    """A model's parameters and layers, from its config; weights are never read."""

    id: str
    """The id or path it was asked for by."""
    model_type: str
    """Transformers' `model_type` of the language model (`text_config` where it is nested)."""
    code: Literal["transformers", "litgpt"] = "transformers"
    """Whose modules the parameters are named and laid out by."""
    source: str
    """Where the config came from: `catalogue`, `file`, `cache` or `hub`."""
    revision: str | None = None
    """The resolved commit, where the source knows it."""
    num_layers: Annotated[int, Meta(ge=1, le=1024)]
    vocab_size: Size
    max_positions: Size | None = None
    """Context length; None: the config does not say."""
    tied_embeddings: bool
    traits: DecoderTraits
    layer_prefix: str = "model.layers."
    """Absolute name of layer 0's parameters up to the index."""
    before: tuple[ParameterSpec, ...]
    """Parameters held before the layers, absolute names."""
    kinds: tuple[LayerKind, ...]
    """Together they cover every layer once."""
    after: tuple[ParameterSpec, ...]
    """Parameters held after the layers; a tied head is not listed."""
    adaptable: tuple[Projection, ...] = ()
    """What adapters see, where that is not the linear layers of the stack."""
    tower_params: Size = 0
    """Parameters outside the language model (vision, audio, projector), in all."""
    outer_type: str | None = None
    """Transformers' `model_type` of the whole, where a language model stands inside one."""
    loads_text_alone: bool = False
    """Transformers' causal class of the whole is the language model's: nothing outside it is loaded."""
    towers: tuple[Tower, ...] = ()
    """What is loaded beside the language model, where that is known; in all `tower_params`."""
    published_only_as: str | None = None
    """The quantization in which the model is published, if there is no unquantized checkpoint of it."""
    notes: tuple[str, ...] = ()

    @property
    def text_params(self) -> int:
        """Parameters of the language model, tied weights once."""
        outside = sum(parameter.num_elements for parameter in (*self.before, *self.after))
        return outside + sum(len(kind.layers) * kind.num_parameters for kind in self.kinds)

    @property
    def frozen_params(self) -> int:
        """Parameters of the language model that its class leaves out of training."""
        outside = sum(parameter.num_elements for parameter in (*self.before, *self.after) if parameter.is_frozen)
        inside = sum(len(kind.layers) * p.num_elements for kind in self.kinds for p in kind.parameters if p.is_frozen)
        return outside + inside

    @property
    def total_params(self) -> int:
        """All unique parameters; buffers do not count."""
        return self.text_params + self.tower_params

    @property
    def loaded_params(self) -> int:
        """Parameters that a fine-tune has on the device: all, or the language model's alone."""
        return self.text_params if self.loads_text_alone else self.total_params

    @property
    def refuses_sdpa(self) -> bool:
        """Whether Transformers has no sdpa for it: its class writes out its attention scores, or this one caps them."""
        writes_out = self.model_type in _WITHOUT_SDPA or self.traits.attention_softcap is not None
        return self.code == "transformers" and writes_out

    def parameters(self) -> Iterator[tuple[int | None, ParameterSpec]]:
        """Yield (layer or None, parameter) in module order, once for every layer."""
        kind_of = {layer: kind for kind in self.kinds for layer in kind.layers}
        for parameter in self.before:
            yield None, parameter
        for layer in range(self.num_layers):
            for parameter in kind_of[layer].parameters:
                yield layer, parameter
        for parameter in self.after:
            yield None, parameter

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The linear layers of the stack, in module order; one entry for each name and shape."""
        found: dict[tuple[str, tuple[int, ...], bool, bool], list[int]] = {}
        for kind in self.kinds:
            names = {parameter.name for parameter in kind.parameters if parameter.role == "bias"}
            for parameter in kind.parameters:
                if parameter.role in ("linear", "conv1d"):
                    name = parameter.name.removesuffix(".weight")
                    key = (name, parameter.shape, f"{name}.bias" in names, parameter.role == "linear")
                    found.setdefault(key, []).extend(kind.layers)
        return tuple(
            Projection(
                name=name,
                in_features=shape[1] if is_linear else shape[0],
                out_features=shape[0] if is_linear else shape[1],
                has_bias=has_bias,
                is_quantizable=is_linear,
                layers=tuple(sorted(layers)),
            )
            for (name, shape, has_bias, is_linear), layers in found.items()
        )

    def count(self, *roles: ParameterRole) -> int:
        """Count the parameters of the language model that play one of these roles."""
        outside = sum(p.num_elements for p in (*self.before, *self.after) if p.role in roles)
        inside = sum(
            len(kind.layers) * p.num_elements for kind in self.kinds for p in kind.parameters if p.role in roles
        )
        return outside + inside
