"""Zamba2: a Mamba 2 stack in which a few transformer blocks are shared by all hybrid layers.

Reads like transformers/models/zamba2/modeling_zamba2.py (5.24). A shared block stands where it first occurs; the
later hybrid layers hold only their own linear and mixer.
"""

from collections.abc import Callable

from foretune.models.families.dense import dense_traits
from foretune.models.families.fields import Fields
from foretune.models.families.parts import Decoder, Heads, Params, decoder, linear, norm, plain, stack, under

__all__ = ["FAMILIES"]

_M, _H = "linear_attention", "hybrid"
_DEFAULT = (_M,) + ((_M,) * 5 + (_H,)) * 7 + (_M,) * 4 + (_H,) + (_M,) * 3 + (_H,) + (_M,) * 2
_NOTE = "The hybrid layers share transformer blocks; each block is counted, and listed, where it first occurs."


def zamba2(c: Fields) -> Decoder:
    """zamba2: mixer layers, and hybrid layers that add a linear and one of `num_mem_blocks` shared blocks."""
    hidden, count, query = c.size("hidden_size"), c.num_layers(), c.size("num_attention_heads")
    types = c.labels("layers_block_type", count) or _DEFAULT
    if len(types) != count:
        raise c.refuse("num_hidden_layers", "and layers_block_type is missing", "Take it from the model's config.")
    dim = c.maybe_size(c.own_name("head_dim")) or max(2 * hidden // query, 1)
    h = Heads(query, c.maybe_size("num_key_value_heads") or query, dim)
    mixer = under("mamba", _mixer(c)) + norm("input_layernorm", hidden)
    hybrids = [index for index, kind in enumerate(types) if kind == _H]

    def layer(key: tuple[str, int | None]) -> Params:
        kind, block = key
        if kind != _H:
            return mixer
        own = linear("linear", hidden, hidden) + under("mamba_decoder", mixer)
        return own if block is None else own + under("shared_transformer", _shared_block(c, h, block, len(hybrids)))

    # Without tied embeddings Transformers ties nothing, and every hybrid layer keeps a block of its own.
    blocks = c.size("num_mem_blocks")
    holders = hybrids[:blocks] if c.flag("tie_word_embeddings") else hybrids
    first = {index: number % blocks for number, index in enumerate(holders)}
    kinds = stack([(kind, first.get(index)) for index, kind in enumerate(types)], layer)
    traits = dense_traits(
        c,
        h,
        rotary=1.0 if c.flag("use_mem_rope") else None,
        intermediate_size=_width(c),
        mixer_groups=c.size("mamba_ngroups"),
        mixer_width=c.size("mamba_expand") * hidden,
        mixer_chunk=c.size("chunk_size"),
    )
    return decoder(c, kinds, traits, final=norm("model.final_layernorm", hidden), notes=(_NOTE,))


def _width(c: Fields) -> int:
    return c.maybe_size("intermediate_size") or 4 * c.size("hidden_size")


def _mixer(c: Fields) -> Params:
    """The Mamba 2 mixer, whose convolution always has a bias."""
    hidden, count, bias = c.size("hidden_size"), c.size("n_mamba_heads"), c.flag("add_bias_linear")
    inner = c.size("mamba_expand") * hidden
    convolved = inner + 2 * c.size("mamba_ngroups") * c.size("mamba_d_state")
    return (
        *plain("dt_bias", count),
        *plain("A_log", count),
        *plain("D", count),
        *plain("conv1d.weight", convolved, 1, c.size("mamba_d_conv")),
        *plain("conv1d.bias", convolved),
        *linear("in_proj", inner + convolved + count, hidden, bias),
        *norm("norm", inner),
        *linear("out_proj", hidden, inner, bias),
    )


def _shared_block(c: Fields, h: Heads, block: int, num_hybrids: int) -> Params:
    """Attention over twice the hidden width and an MLP, each with adapters for the layers that use this block."""
    hidden, rank, bias = c.size("hidden_size"), c.size("adapter_rank"), c.flag("add_bias_linear")
    wide, width = 2 * hidden, _width(c)
    users = [i for i in range(num_hybrids) if i % c.size("num_mem_blocks") == block]
    attention_adapters: list[Params] = []
    if c.flag("use_shared_attention_adapter"):
        attention_adapters = [
            _adapter(f"linear_{name}_adapter_list.{i}", wide, rank, wide) for name in ("q", "k", "v") for i in users
        ]
    attention = (
        *linear("q_proj", h.query_width, wide),
        *linear("k_proj", h.kv_width, wide),
        *linear("v_proj", h.kv_width, wide),
        *linear("o_proj", hidden, h.query_width),
        *(parameter for adapter in attention_adapters for parameter in adapter),
    )
    mlp = (
        *linear("gate_up_proj", 2 * width, hidden, bias),
        *linear("down_proj", hidden, width, bias),
        *(p for i in users for p in _adapter(f"gate_up_proj_adapter_list.{i}", hidden, rank, 2 * width)),
    )
    return (
        *under("self_attn", attention),
        *under("feed_forward", mlp),
        *norm("input_layernorm", wide),
        *norm("pre_ff_layernorm", hidden),
    )


def _adapter(name: str, in_features: int, rank: int, out_features: int) -> Params:
    return linear(f"{name}.0", rank, in_features) + linear(f"{name}.1", out_features, rank)


FAMILIES: dict[str, Callable[[Fields], Decoder]] = {"zamba2": zamba2}
