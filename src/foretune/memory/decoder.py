"""What all decoders share: the backbone's walk over its layers, masks, the cache, checkpointed layers.

Follows transformers 5.24: models/llama/modeling_llama.py for the walk, masking_utils.py for which masks are made.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from foretune.errors import UnsupportedError
from foretune.memory import blocks, ops
from foretune.memory.blocks import Module, RmsNorm, call
from foretune.memory.kernels import AttentionKernels
from foretune.memory.longrope import LongFrequencies
from foretune.memory.masks import (
    additive_mask,
    ask_whether_all,
    causal_order,
    chunked_order,
    find_packed,
    mask_table,
    windowed_order,
)
from foretune.memory.ops import add_scalar, unsqueeze
from foretune.memory.tape import Tensor, checkpoint, current
from foretune.models import DecoderTraits, ModelShape

__all__ = ["Cache", "Decoder", "Layer", "Modules", "RunOptions"]


class Modules(NamedTuple):
    """What a decoder is built from: its numbers, its modules by name, and how it attends."""

    traits: DecoderTraits
    layers: tuple[int, ...]
    """Indices of the layers that are built (the recorded ones)."""
    linear: Callable[..., Module]
    """A linear layer by absolute name (and its class), with its adapter if it has one."""
    weight: Callable[[str], Tensor]
    """A parameter by absolute name."""
    optional: Callable[[str], Tensor | None]
    """A parameter by absolute name, or None."""
    has: Callable[[str], bool]
    """Whether there is a linear layer of this absolute name."""
    buffer: Callable[[str], Tensor]
    """A buffer by name, a layer's by absolute name."""
    attention: Literal["sdpa", "eager"]
    kernels: AttentionKernels
    prefix: str
    """Absolute name of the layers up to the index."""
    model_type: str = ""
    code: str = "transformers"
    """Whose modules and of which release (`StackProfile.model_code`)."""
    is_quantized: bool = False


class Decoder:
    """A backbone. Subclasses say how layers are made and what stands before and after them."""

    norm_spelling: ClassVar[Literal["llama", "olmo2", "gemma"]] = "llama"
    keyword_order: ClassVar[tuple[str, ...]] = ("attention_mask", "position_embeddings", "position_ids", "cache")
    keeps_outputs: ClassVar[bool] = False
    """The loop's local holds each layer's outputs beside the hidden states."""
    """The order in which the class passes its layers' keywords is the order in which they die."""
    mask_kwargs: ClassVar[bool] = False
    """The class keeps the mask's arguments in a dictionary of its own (mask_kwargs)."""
    masks_are_lazy: ClassVar[bool] = False
    """That dictionary is closed over by the functions that make the masks (dots1, llama4)."""
    masks_know_positions: ClassVar[bool] = True
    """The class passes positions to its masks, which look for packed rows in them (not so gpt_oss)."""
    parameters_in_32bit: ClassVar[frozenset[str]] = frozenset()
    """Parameters of a layer that the class makes and keeps in fp32 (_keep_in_fp32_modules_strict)."""
    caps_logits: ClassVar[bool] = True
    """The class applies the cap on logits that its config names."""
    scales_before_head: ClassVar[bool] = False
    """The class scales what enters the head (minicpm3)."""
    scales_logits: ClassVar[bool] = False
    """The class multiplies or divides its logits by a number (granite, cohere)."""
    rebinds_embeddings: ClassVar[bool] = False
    """The dropout's result takes the place of the embeddings, which are not held beside it (phi)."""
    num_last_alone: ClassVar[int] = 1
    """Layers at the end that stand for themselves alone: two where the gradient that enters the last layer is handed on
    in another way (templates.find_stand_ins)."""
    own_activations: ClassVar[frozenset[str]] = frozenset()
    """Activations beyond blocks.ACTIVATIONS: with parameters of their own."""
    logits_in_32bit: ClassVar[bool] = False
    """The class hands its logits back in fp32 (mamba2, nemotron_h, mllama)."""
    has_causal_name: ClassVar[bool] = True
    """The causal class is called ...ForCausalLM, by which Transformers finds its loss."""
    kernel_packages: ClassVar[str] = ""
    """Packages whose kernels would run in the place of the class's own torch code, which is what runs here."""
    embedding_name: ClassVar[str] = "model.embed_tokens.weight"
    final_norm_name: ClassVar[str] = "model.norm"

    def __init__(self, modules: Modules) -> None:
        self.modules, self.traits = modules, modules.traits
        width = self.traits.rotary_dim if self.traits.has_long_rope else None
        self.long_frequencies = LongFrequencies(width // 2) if width else None
        self.embedding = modules.weight(self.embedding_name)
        self.layers = [self.make_layer(i) for i in modules.layers]
        self.norm = self.make_norm(self.final_norm_name)

    # -- parts
    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and dtype of each buffer: rotary frequencies, kept twice (inv_freq and original_inv_freq)."""
        width = traits.rotary_dim
        return [(name, (width // 2,), "f32") for name in ("inv_freq", "original_inv_freq")] if width else []

    @classmethod
    def layer_buffers(
        cls, traits: DecoderTraits, parameters: frozenset[str], dtype: str
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Name (inside the layer), shape and dtype of each buffer of a layer that holds these parameters."""
        return []

    @classmethod
    def layer_tags(cls, shape: ModelShape) -> list[object]:
        """What sets a layer's events apart from another's beside parameters, window and rotary embedding."""
        return [None] * shape.num_layers

    def make_norm(self, name: str) -> Module:
        return RmsNorm(self.modules.weight(f"{name}.weight"), self.norm_spelling)

    def make_layer(self, index: int) -> "Layer":
        raise NotImplementedError

    def embed(self, input_ids: Tensor) -> Tensor:
        return ops.embedding(self.embedding, input_ids)

    def head_weight(self, weight: Tensor) -> Tensor:
        """The head's weight as the class multiplies with it."""
        return weight

    # -- forward
    def __call__(
        self,
        input_ids: Tensor,
        run: "RunOptions",
        position_ids: Tensor | None = None,
        cache: "Cache | None" = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: dict[str, Tensor | None] | None = None,
    ) -> tuple[Tensor, Any]:
        """Run the backbone; returns the normed hidden states and the cache.

        Who stands around the language model passes masks and embeddings. The arguments that nobody passes stand in the
        signature as in the class's forward: locals die in that order.
        """
        tape = current()
        if inputs_embeds is None:
            inputs_embeds = self.embed(input_ids)
        if run.embeddings_want_grad:
            inputs_embeds.needs_grad = True  # enable_input_require_grads: a leaf
        inputs_embeds = self.after_embedding(inputs_embeds)
        cache = Cache() if run.keeps_cache else None
        position_ids = self.positions_of(run)
        hidden_states, _position_embeds = self.begin(inputs_embeds, position_ids)
        masks: dict[str, Tensor | None] = {}
        if self.masks_are_lazy:
            closed_over = {"inputs_embeds": inputs_embeds, "position_ids": position_ids}
            _functions = (lambda: closed_over,)  # what a function closes over dies after all locals
        elif self.mask_kwargs and attention_mask is None:
            _mask_kwargs = {"inputs_embeds": inputs_embeds, "position_ids": position_ids}
            if not self.masks_know_positions:
                del _mask_kwargs["position_ids"]
        masks = self.masks(run, inputs_embeds) if attention_mask is None else attention_mask
        if type(self).rescaled is not Decoder.rescaled:
            inputs_embeds = hidden_states = self.rescaled(inputs_embeds)
        hidden_states, _late_embeds = self.begin_after_masks(hidden_states, position_ids)
        hidden_states = self.after_masks(hidden_states)
        if self.rebinds_embeddings:
            inputs_embeds = hidden_states
        if self.long_frequencies is not None:
            self.long_frequencies.update(position_ids)
        tables = self.position_tables(hidden_states, position_ids)
        hidden_states = self.before_layers(hidden_states)
        for i, layer in enumerate(self.layers):
            step = layer.checkpointed if run.is_checkpointed else layer.forward
            tape.segment("forward", i)
            keywords = {
                "attention_mask": masks[layer.mask_kind],
                "position_embeddings": tables[layer.table_kind],
                "position_ids": position_ids,
                "cache": cache,
            }
            outputs = call(step, hidden_states, **{k: keywords[k] for k in self.keyword_order if k in keywords})
            if type(outputs) is tuple:
                hidden_states, _attn_weights = outputs
            else:
                hidden_states = outputs
            del keywords
            _outputs = hidden_states if self.keeps_outputs else None
            del outputs
            run.end_layer(i)
        tape.segment("head")
        hidden_states = call(self.norm, hidden_states)
        return hidden_states, cache

    def after_embedding(self, inputs_embeds: Tensor) -> Tensor:
        """What the class does to the embedding's output before anything else."""
        return inputs_embeds

    def positions_of(self, run: "RunOptions") -> Tensor:
        """The batch's positions where rows are packed; else they are counted, one row for all."""
        if run.positions is not None:
            return run.positions
        return unsqueeze(self.count_positions(run.sequence_length), 0)

    def count_positions(self, length: int) -> Tensor:
        """arange, to which the number of cached tokens is added."""
        return add_scalar(Tensor((length,), "i64"))

    def begin(self, inputs_embeds: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what enters the first layer, and position embeddings that the class's forward holds on to."""
        return inputs_embeds, None

    def rescaled(self, inputs_embeds: Tensor) -> Tensor:
        """What takes the place of the embeddings once the masks are there (granitemoe)."""
        return inputs_embeds

    def begin_after_masks(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Any]:
        """As `begin`, for classes that make their masks first."""
        return hidden_states, None

    def after_masks(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def before_layers(self, hidden_states: Tensor) -> Tensor:
        """What stands between the position tables and the first layer."""
        return hidden_states

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        width = self.traits.rotary_dim
        return {"full": blocks.rotary_tables(hidden_states.dtype, position_ids, width) if width else None}

    def masks(self, run: "RunOptions", inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        return {"full": run.causal_mask(inputs_embeds, None)}


class Layer:
    """A decoder layer: `forward`, and `checkpointed`, which keeps only its input."""

    mask_kind = "full"
    table_kind = "full"

    forward: Callable[..., Any]
    """Run the layer; each class takes the keywords of its own file. Returns hidden states, or a pair with the attention
    weights, which the backbone's loop then holds."""

    def checkpointed(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        def run(hidden_states: Tensor) -> Any:
            return self.forward(hidden_states, **kwargs)

        return checkpoint(run, hidden_states)


class RunOptions:
    """How the backbone is run: batch, masks, checkpointing; shared by every family."""

    def __init__(
        self,
        *,
        micro_batch_size: int,
        sequence_length: int,
        attention: Literal["sdpa", "eager", "flash_attention_2"],
        is_checkpointed: bool,
        embeddings_want_grad: bool,
        keeps_cache: bool,
        passes_mask: bool,
    ) -> None:
        self.micro_batch_size, self.sequence_length = micro_batch_size, sequence_length
        self.attention, self.is_checkpointed = attention, is_checkpointed
        self.embeddings_want_grad, self.keeps_cache, self.passes_mask = embeddings_want_grad, keeps_cache, passes_mask
        self.padding: Tensor | None = None
        self.positions: Tensor | None = None
        """[B, S], where rows are packed."""

    def end_layer(self, index: int) -> None:
        """Note where a layer's graph ends, so that backward's events are cut at the same place."""
        tape = current()
        if index == len(tape.layer_ends):
            tape.layer_ends.append(tape.next_sequence)
        else:
            tape.layer_ends[index] = tape.next_sequence
        tape.num_layers = max(tape.num_layers, index + 1)

    def causal_mask(
        self, inputs_embeds: Tensor, window: int | None, *, can_skip: bool = True, has_positions: bool = True
    ) -> Tensor | None:
        """create_causal_mask and create_sliding_window_causal_mask (transformers/masking_utils.py).

        Where positions are passed, they are asked whether they belong to packed rows; then the mask is never left out.
        """
        b, s = self.micro_batch_size, self.sequence_length
        padding = groups = None
        if self.padding is None:
            if has_positions:
                groups = find_packed(b, s, is_packed=self.positions is not None)
        else:
            padding = ops.to(self.padding, "bool")
        if self.attention == "flash_attention_2":
            window = None  # an argument of the package's kernel, not a mask
        is_windowed = window is not None and s >= window
        if self.attention != "eager" and can_skip and not is_windowed and groups is None:
            if padding is not None:
                ask_whether_all(padding)
            return None
        order = causal_order if window is None else windowed_order
        table = mask_table(order, b, s, padding, is_packed=groups is not None)
        if self.attention != "eager":
            return table
        out = additive_mask(table, inputs_embeds.dtype)
        del table, padding
        return out

    def ask_whether_padded(self) -> None:
        """create_recurrent_attention_mask: a mask of ones is asked about and dropped."""
        if self.padding is not None and self.sequence_length > 1:
            equal = Tensor(self.padding.shape, "bool")
            _answer = Tensor((), "bool")
            del equal

    def chunked_mask(self, inputs_embeds: Tensor, chunk: int) -> Tensor | None:
        """create_chunked_causal_mask (transformers/masking_utils.py), without padding: chunks begin with the row."""
        b, s = self.micro_batch_size, self.sequence_length
        if self.padding is not None:
            raise UnsupportedError(
                "Attention in chunks under a padding mask is not estimated yet.",
                hint="Take a stack that passes no mask (foretune), or trace it.",
            )
        groups = find_packed(b, s, is_packed=self.positions is not None)
        _left_padding_tokens = Tensor((b,), "i64")
        if self.attention == "sdpa" and s < chunk and groups is None:
            return None
        table = mask_table(chunked_order, b, s, None, is_packed=groups is not None)
        if self.attention == "sdpa":
            return table
        out = additive_mask(table, inputs_embeds.dtype)
        del table
        return out


class Cache:
    """A DynamicCache: HF keeps keys and values while training without checkpointing when use_cache is on."""

    def __init__(self) -> None:
        self.tape = current()
        self.kept: list[dict[str, Tensor]] = []

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's keys and values; return the copies."""
        self.kept.append({"keys": ops.cat_copy(key), "values": ops.cat_copy(value)})
        return self.kept[-1]["keys"], self.kept[-1]["values"]

    def __del__(self) -> None:
        while self.kept:
            self.tape.segment("cache", len(self.kept) - 1)
            self.kept.pop()
        self.tape.segment("cache end")
