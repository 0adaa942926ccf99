"""Count what stands outside the language model: vision and audio towers and the projectors to the text width.

Only the number matters here (nothing in a tower is adapted or quantized), so each function returns a count, written
in the words of the class it follows in transformers/models/<family>/modeling_<family>.py (5.24).
"""

from foretune.models.families.fields import Fields

__all__ = [
    "gemma3_tower",
    "gemma4_towers",
    "idefics3_tower",
    "kimi_k25_tower",
    "llama4_tower",
    "mistral3_tower",
    "mllama_tower",
    "paligemma_tower",
    "qwen2_5_vl_tower",
    "qwen2_vl_tower",
    "qwen3_5_tower",
    "qwen3_vl_tower",
    "step3p7_tower",
]


def _linear(out_features: int, in_features: int, bias: bool = True) -> int:
    return out_features * in_features + (out_features if bias else 0)


def _layer_norms(count: int, width: int) -> int:
    """LayerNorms with weight and bias."""
    return count * 2 * width


def _patches(c: Fields) -> int:
    side = c.size("image_size") // c.size("patch_size")
    return side * side


def _conv_patch(c: Fields, width: int, bias: bool = True) -> int:
    patch = c.size("patch_size")
    return width * c.size("num_channels") * patch * patch + (width if bias else 0)


def _block(hidden: int, width: int) -> int:
    """A ViT block: two LayerNorms, four projections and two MLP matrices, all with bias."""
    return _layer_norms(2, hidden) + 4 * _linear(hidden, hidden) + _linear(width, hidden) + _linear(hidden, width)


# -- Qwen --------------------------------------------------------------------------------------------------------


def _qwen_patch_embed(v: Fields, width: int, bias: bool) -> int:
    patch = v.size("patch_size")
    kernel = v.size("in_channels") * v.size("temporal_patch_size") * patch * patch
    return width * kernel + (width if bias else 0)


def qwen2_vl_tower(v: Fields, _text_width: int) -> int:
    """qwen2_vl: blocks of `embed_dim`, a merger to `hidden_size`."""
    width, ratio = v.size("embed_dim"), v.number("mlp_ratio") or 4.0
    blocks = v.num_layers("depth") * _block(width, int(width * ratio))
    merged = width * v.size("spatial_merge_size") ** 2
    merger = _layer_norms(1, width) + _linear(merged, merged) + _linear(v.size("hidden_size"), merged)
    return _qwen_patch_embed(v, width, bias=False) + blocks + merger


def qwen2_5_vl_tower(v: Fields, _text_width: int) -> int:
    """qwen2_5_vl: RMSNorms and a gated MLP with biases."""
    width, inner = v.size("hidden_size"), v.size("intermediate_size")
    mlp = 2 * _linear(inner, width) + _linear(width, inner)
    blocks = v.num_layers("depth") * (2 * width + 4 * _linear(width, width) + mlp)
    merged = width * v.size("spatial_merge_size") ** 2
    merger = width + _linear(merged, merged) + _linear(v.size("out_hidden_size"), merged)
    return _qwen_patch_embed(v, width, bias=False) + blocks + merger


def qwen3_5_tower(v: Fields, _text_width: int) -> int:
    """qwen3_5: learned positions, ViT blocks, one merger."""
    width = v.size("hidden_size")
    blocks = v.num_layers("depth") * _block(width, v.size("intermediate_size"))
    embeddings = _qwen_patch_embed(v, width, bias=True) + v.size("num_position_embeddings") * width
    return embeddings + blocks + _layer_norms(1, width) + _qwen3_merger(v)


def _qwen3_merger(v: Fields) -> int:
    merged = v.size("hidden_size") * v.size("spatial_merge_size") ** 2
    return _linear(merged, merged) + _linear(v.size("out_hidden_size"), merged)


def qwen3_vl_tower(v: Fields, text_width: int) -> int:
    """qwen3_vl: qwen3_5's tower and one more merger, normed after the shuffle, for each deepstack layer."""
    merged = v.size("hidden_size") * v.size("spatial_merge_size") ** 2
    deepstack = len(v.integers("deepstack_visual_indexes") or ())
    return qwen3_5_tower(v, text_width) + deepstack * (_layer_norms(1, merged) + _qwen3_merger(v))


# -- Gemma -------------------------------------------------------------------------------------------------------


def siglip_tower(v: Fields) -> int:
    """siglip_vision_model: with an attention-pooling head unless `vision_use_head` is false."""
    width, inner = v.size("hidden_size"), v.size("intermediate_size")
    embeddings = _conv_patch(v, width) + _patches(v) * width
    body = embeddings + v.num_layers() * _block(width, inner) + _layer_norms(1, width)
    if not v.flag("vision_use_head"):
        return body
    # A probe, torch's MultiheadAttention (in_proj and out_proj with biases), a norm and an MLP.
    head = width + _linear(3 * width, width) + _linear(width, width) + _layer_norms(1, width)
    return body + head + _linear(inner, width) + _linear(width, inner)


def gemma3_tower(v: Fields, text_width: int) -> int:
    """gemma3: SigLIP, a projection matrix and a norm on the soft tokens."""
    return siglip_tower(v) + v.size("hidden_size") * text_width + v.size("hidden_size")


def gemma4_towers(vision: Fields | None, audio: Fields | None, text_width: int) -> int:
    """gemma4: each tower only where its config is not null."""
    count = 0
    if vision is not None:
        count += _gemma4_vision(vision) + vision.size("hidden_size") * text_width
    if audio is not None:
        count += _gemma4_audio(audio) + audio.size("output_proj_dims") * text_width
    return count


def _gemma4_vision(v: Fields) -> int:
    width, inner, dim = v.size("hidden_size"), v.size("intermediate_size"), v.size("head_dim")
    queries, keys = v.size("num_attention_heads") * dim, v.size("num_key_value_heads") * dim
    attention = 2 * width * queries + 2 * width * keys + 2 * dim
    layers = v.num_layers() * (attention + 3 * width * inner + 4 * width)
    patch = v.size("patch_size")
    return 2 * v.size("position_embedding_size") * width + width * 3 * patch * patch + layers


def _gemma4_audio(a: Fields) -> int:
    width, channels = a.size("hidden_size"), a.integers("subsampling_conv_channels", low=1) or (128, 32)
    if len(channels) != 2:
        raise a.refuse("subsampling_conv_channels", "not two numbers", "Write two, for example [128, 32].")
    first, second = channels
    subsampling = first * 9 + first + second * first * 9 + second + (first // 4) * second * width
    feed_forward = 2 * (8 * width * width + 2 * width)
    attention = 5 * width * width + width // a.size("num_attention_heads")
    convolution = 3 * width * width + width * a.size("conv_kernel_size") + 2 * width
    layers = a.num_layers() * (feed_forward + attention + convolution + 3 * width)
    return subsampling + layers + _linear(a.size("output_proj_dims"), width)


# -- Llama -------------------------------------------------------------------------------------------------------


def llama4_tower(v: Fields, text_width: int) -> int:
    """llama4: unfolded patches, a pixel-shuffle adapter and a projector without biases."""
    width, inner = v.size("hidden_size"), v.size("intermediate_size")
    embeddings = _conv_patch(v, width, bias=False) + width + (_patches(v) + 1) * width
    layers = v.num_layers() * _block(width, inner)
    projected = v.size("projector_output_dim")
    adapter = inner * v.size("projector_input_dim") + projected * projected
    return embeddings + _layer_norms(2, width) + layers + adapter + v.size("vision_output_dim") * text_width


def mllama_tower(v: Fields, text_width: int) -> int:
    """mllama: tiles, gated positions, local and global layers (the global ones with two gates), a projector."""
    width, inner, tiles = v.size("hidden_size"), v.size("intermediate_size"), v.size("max_num_tiles")
    ratios = v.raw("supported_aspect_ratios")
    rows = (len(ratios) if isinstance(ratios, list) and ratios else 8) + 1
    patches = _patches(v) + 1
    positions = 1 + patches * width + rows * tiles * patches * width
    tile_positions = 2 * (1 + rows * tiles * width)
    embeddings = width + _conv_patch(v, width, bias=False) + positions + tile_positions
    heads = v.size("attention_heads") * (width // v.size("attention_heads"))
    block = 4 * width * heads + _linear(inner, width) + _linear(width, inner) + _layer_norms(2, width)
    layers = (v.num_layers() + v.num_layers("num_global_layers")) * block + 2 * v.num_layers("num_global_layers")
    return embeddings + _layer_norms(2, width) + layers + _linear(text_width, v.size("vision_output_dim"))


def paligemma_tower(top: Fields, v: Fields, _text_width: int) -> int:
    """paligemma: SigLIP and one linear to `projection_dim`."""
    return siglip_tower(v) + _linear(top.size("projection_dim"), v.size("hidden_size"))


def idefics3_tower(top: Fields, v: Fields, text_width: int) -> int:
    """idefics3, smolvlm: SigLIP without a head, and a connector without bias over shuffled pixels."""
    width, inner = v.size("hidden_size"), v.size("intermediate_size")
    tower = _conv_patch(v, width) + _patches(v) * width + v.num_layers() * _block(width, inner) + _layer_norms(1, width)
    return tower + text_width * width * top.size("scale_factor") ** 2


# -- others ------------------------------------------------------------------------------------------------------


def mistral3_tower(top: Fields, v: Fields, text_width: int) -> int:
    """mistral3: Pixtral (RMSNorms, gated MLP, no biases), a patch merger and a two-layer projector."""
    width, inner = v.size("hidden_size"), v.size("intermediate_size")
    block = 2 * width + 4 * width * width + 3 * width * inner
    tower = _conv_patch(v, width, bias=False) + width + v.num_layers() * block
    layer = top.raw("vision_feature_layer")
    features = len(layer) if isinstance(layer, (list, tuple)) else 1
    bias = top.flag("multimodal_projector_bias")
    merger = width * width * top.size("spatial_merge_size") ** 2
    projector = _linear(text_width, width * features, bias) + _linear(text_width, text_width, bias)
    return tower + width + merger + projector


def kimi_k25_tower(top: Fields, v: Fields, text_width: int) -> int:
    """kimi_k25: learned 2-D positions, ViT blocks, a projector over merged patches."""
    width = v.size("hidden_size")
    positions = v.size("pos_emb_height") * v.size("pos_emb_width") * width
    patch = v.size("patch_size")
    tower = width * 3 * patch * patch + width + positions
    tower += v.num_layers() * _block(width, v.size("intermediate_size")) + _layer_norms(1, width)
    kernel = v.integers("merge_kernel_size", low=1) or (2, 2)
    if len(kernel) != 2:
        raise v.refuse("merge_kernel_size", "not two numbers", "Write two, for example [2, 2].")
    merged = width * kernel[0] * kernel[1]
    pre_norm = _layer_norms(1, top.maybe_size("projection_hidden_size") or width)
    return tower + pre_norm + _linear(merged, merged) + _linear(text_width, merged)


def step3p7_tower(top: Fields, v: Fields, text_width: int) -> int:
    """step3p7: ViT blocks with layer scales, two strided convolutions, a projector."""
    width = v.maybe_size("width") or v.size("hidden_size")
    layers = v.num_layers("layers") if v.has("layers") else v.num_layers()
    inner = int(width * (v.number("mlp_ratio") or 8960 / 1536))
    embeddings = _conv_patch(v, width, bias=False) + _patches(v) * width + _layer_norms(1, width)
    convolutions = 9 * width * 2 * width + 2 * width + 9 * 2 * width * 4 * width + 4 * width
    projector = _linear(text_width, 4 * width, top.flag("projector_bias"))
    return embeddings + layers * (_block(width, inner) + 2 * width) + convolutions + projector
