"""The towers that Transformers loads with the language model, parameter by parameter: Gemma 3 and Gemma 4.

Each function reads like the class it is named after in transformers/models/<family>/modeling_<family>.py (5.24). The
sums are those of towers.py; here names, order and buffers matter, since the weights lie on the device. A linear layer
below a numbered layer is quantized like the decoder's.
"""

from foretune.models.families.fields import Fields
from foretune.models.families.parts import Params, linear, norm, outside, plain, under
from foretune.models.shape import BufferSpec, Tower

__all__ = ["gemma3_towers", "gemma4_towers"]

Buffers = tuple[BufferSpec, ...]


def _buffer(name: str, *shape: int, dtype: str = "model") -> Buffers:
    return (BufferSpec(name=name, shape=shape, dtype=dtype),)  # type: ignore[arg-type]


# -- Gemma 3 -----------------------------------------------------------------------------------------------------


def gemma3_towers(v: Fields, text_width: int) -> tuple[Tower, ...]:
    """Gemma3Model: SigLIP and the projector stand before the language model."""
    width = v.size("hidden_size")
    projector = plain("mm_input_projection_weight", width, text_width) + norm("mm_soft_emb_norm", width)
    parameters = under("model.vision_tower", _siglip(v)) + under("model.multi_modal_projector", projector)
    buffers = _buffer("model.vision_tower.embeddings.position_ids", 1, _patches(v), dtype="int64")
    return (Tower(parameters=parameters, buffers=buffers, is_before=True),)


def _patches(v: Fields) -> int:
    side = v.size("image_size") // v.size("patch_size")
    return side * side


def _siglip(v: Fields) -> Params:
    width, inner, patch = v.size("hidden_size"), v.size("intermediate_size"), v.size("patch_size")
    block = (
        *norm("layer_norm1", width, bias=True),
        *(
            p
            for name in ("k_proj", "v_proj", "q_proj", "out_proj")
            for p in linear(f"self_attn.{name}", width, width, True)
        ),
        *norm("layer_norm2", width, bias=True),
        *linear("mlp.fc1", inner, width, True),
        *linear("mlp.fc2", width, inner, True),
    )
    head: Params = ()
    if v.flag("vision_use_head"):
        head = (
            *plain("probe", 1, 1, width),
            *plain("attention.in_proj_weight", 3 * width, width),
            *plain("attention.in_proj_bias", 3 * width),
            *outside(linear("attention.out_proj", width, width, True)),
            *norm("layernorm", width, bias=True),
            *outside(linear("mlp.fc1", inner, width, True)),
            *outside(linear("mlp.fc2", width, inner, True)),
        )
    return (
        *plain("embeddings.patch_embedding.weight", width, v.size("num_channels"), patch, patch),
        *plain("embeddings.patch_embedding.bias", width),
        *plain("embeddings.position_embedding.weight", _patches(v), width),
        *(p for i in range(v.num_layers()) for p in under(f"encoder.layers.{i}", block)),
        *norm("post_layernorm", width, bias=True),
        *under("head", head),
    )


# -- Gemma 4 -----------------------------------------------------------------------------------------------------


def gemma4_towers(vision: Fields | None, audio: Fields | None, text_width: int) -> tuple[Tower, ...]:
    """Gemma4Model: the vision tower stands before the language model, the audio tower and both projectors after it."""
    towers: list[Tower] = []
    after: Params = ()
    projectors: Params = ()
    buffers: Buffers = ()
    if vision is not None:
        parameters = under("model.vision_tower", _gemma4_vision(vision))
        towers.append(Tower(parameters=parameters, buffers=_gemma4_vision_buffers(vision), is_before=True))
        width = vision.size("hidden_size")
        projectors += outside(linear("model.embed_vision.embedding_projection", text_width, width))
    if audio is not None:
        after, buffers = under("model.audio_tower", _gemma4_audio(audio)), _gemma4_audio_buffers(audio)
        width = audio.size("output_proj_dims")
        projectors += outside(linear("model.embed_audio.embedding_projection", text_width, width))
    if after or projectors:
        towers.append(Tower(parameters=after + projectors, buffers=buffers, is_before=False))
    return tuple(towers)


def _gemma4_vision(v: Fields) -> Params:
    width, inner, dim, patch = (
        v.size("hidden_size"),
        v.size("intermediate_size"),
        v.size("head_dim"),
        v.size("patch_size"),
    )
    queries, keys = v.size("num_attention_heads") * dim, v.size("num_key_value_heads") * dim
    layer = (
        *linear("self_attn.q_proj.linear", queries, width),
        *linear("self_attn.k_proj.linear", keys, width),
        *linear("self_attn.v_proj.linear", keys, width),
        *linear("self_attn.o_proj.linear", width, queries),
        *norm("self_attn.q_norm", dim),
        *norm("self_attn.k_norm", dim),
        *linear("mlp.gate_proj.linear", inner, width),
        *linear("mlp.up_proj.linear", inner, width),
        *linear("mlp.down_proj.linear", width, inner),
        *norm("input_layernorm", width),
        *norm("post_attention_layernorm", width),
        *norm("pre_feedforward_layernorm", width),
        *norm("post_feedforward_layernorm", width),
    )
    return (
        *plain("patch_embedder.position_embedding_table", 2, v.size("position_embedding_size"), width),
        *outside(linear("patch_embedder.input_proj", width, 3 * patch * patch)),
        *(p for i in range(v.num_layers()) for p in under(f"encoder.layers.{i}", layer)),
    )


_VISION_LINEARS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)


def _clips(c: Fields, name: str, *, by_default: bool = False) -> Buffers:
    """Gemma4ClippableLinear: four bounds where the tower clips."""
    if not (c.flag("use_clipped_linears") if c.has("use_clipped_linears") else by_default):
        return ()
    bounds = ("input_min", "input_max", "output_min", "output_max")
    return tuple(b for bound in bounds for b in _buffer(f"{name}.{bound}"))


def _gemma4_vision_buffers(v: Fields) -> Buffers:
    standard: Buffers = ()
    if v.has("standardize") and v.flag("standardize"):
        standard = _buffer("model.vision_tower.std_bias", v.size("hidden_size"))
        standard += _buffer("model.vision_tower.std_scale", v.size("hidden_size"))
    quarter = v.size("head_dim") // 4
    return (
        *standard,
        *_buffer("model.vision_tower.encoder.rotary_emb.inv_freq", quarter, dtype="fp32"),
        *_buffer("model.vision_tower.encoder.rotary_emb.original_inv_freq", quarter, dtype="fp32"),
        *(
            clip
            for i in range(v.num_layers())
            for name in _VISION_LINEARS
            for clip in _clips(v, f"model.vision_tower.encoder.layers.{i}.{name}")
        ),
    )


def _gemma4_audio(a: Fields) -> Params:
    width, channels = a.size("hidden_size"), a.integers("subsampling_conv_channels", low=1) or (128, 32)
    first, second = channels[0], channels[-1]

    def feed_forward(name: str) -> Params:
        return (
            *linear(f"{name}.ffw_layer_1.linear", 4 * width, width),
            *linear(f"{name}.ffw_layer_2.linear", width, 4 * width),
            *norm(f"{name}.pre_layer_norm", width),
            *norm(f"{name}.post_layer_norm", width),
        )

    layer = (
        *feed_forward("feed_forward1"),
        *feed_forward("feed_forward2"),
        *plain("self_attn.per_dim_scale", width // a.size("num_attention_heads")),
        *(
            p
            for name in ("q_proj", "k_proj", "v_proj", "post")
            for p in linear(f"self_attn.{name}.linear", width, width)
        ),
        *linear("self_attn.relative_k_proj", width, width),
        *linear("lconv1d.linear_start.linear", 2 * width, width),
        *linear("lconv1d.linear_end.linear", width, width),
        *plain("lconv1d.depthwise_conv1d.weight", width, 1, a.size("conv_kernel_size")),
        *norm("lconv1d.pre_layer_norm", width),
        *norm("lconv1d.conv_norm", width),
        *norm("norm_pre_attn", width),
        *norm("norm_post_attn", width),
        *norm("norm_out", width),
    )
    return (
        *plain("subsample_conv_projection.layer0.conv.weight", first, 1, 3, 3),
        *norm("subsample_conv_projection.layer0.norm", first),
        *plain("subsample_conv_projection.layer1.conv.weight", second, first, 3, 3),
        *norm("subsample_conv_projection.layer1.norm", second),
        *outside(linear("subsample_conv_projection.input_proj_linear", width, (first // 4) * second)),
        *(p for i in range(a.num_layers()) for p in under(f"layers.{i}", layer)),
        *outside(linear("output_proj", a.size("output_proj_dims"), width, True)),
    )


def _gemma4_audio_buffers(a: Fields) -> Buffers:
    def clips(name: str) -> Buffers:
        return _clips(a, name, by_default=True)

    def layer(prefix: str) -> Buffers:
        feed_forward = ("feed_forward1.ffw_layer_1", "feed_forward1.ffw_layer_2", "feed_forward2.ffw_layer_1")
        attention = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "post"))
        return (
            *(c for name in (*feed_forward, "feed_forward2.ffw_layer_2") for c in clips(f"{prefix}.{name}")),
            *_buffer(f"{prefix}.self_attn.softcap"),
            *(c for name in attention for c in clips(f"{prefix}.{name}")),
            *(c for name in ("linear_start", "linear_end") for c in clips(f"{prefix}.lconv1d.{name}")),
        )

    return (
        *_buffer("model.audio_tower.rel_pos_enc.inv_timescales", 1, 1, a.size("hidden_size") // 2),
        *(b for i in range(a.num_layers()) for b in layer(f"model.audio_tower.layers.{i}")),
    )
