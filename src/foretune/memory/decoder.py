"""What all decoders share: the backbone's walk over its layers, masks, the cache, checkpointed layers.

Follows transformers 5.24: models/llama/modeling_llama.py for the walk, masking_utils.py for masks.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from foretune.memory import blocks, ops
from foretune.memory.blocks import Module, RmsNorm, call
from foretune.memory.kernels import AttentionKernels
from foretune.memory.layout import numel
from foretune.memory.ops import add_scalar, unsqueeze
from foretune.memory.tape import Tensor, checkpoint, current
from foretune.models import DecoderTraits

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
    buffer: Callable[[str], Tensor]
    """A buffer by name."""
    attention: Literal["sdpa", "eager"]
    kernels: AttentionKernels
    prefix: str
    """Absolute name of the layers up to the index."""


class Decoder:
    """A backbone. Subclasses say how layers are made and what stands before and after them."""

    norm_spelling: ClassVar[Literal["llama", "olmo2", "gemma"]] = "llama"
    keyword_order: ClassVar[tuple[str, ...]] = ("attention_mask", "position_embeddings", "position_ids", "cache")
    keeps_outputs: ClassVar[bool] = False
    """The loop's local holds each layer's outputs beside the hidden states."""
    """The order in which the class passes its layers' keywords is the order in which they die."""
    mask_kwargs: ClassVar[bool] = False
    """The class keeps the mask's arguments in a dictionary of its own (mask_kwargs)."""
    has_causal_name: ClassVar[bool] = True
    """The causal class is called ...ForCausalLM, by which Transformers finds its loss."""
    embedding_name: ClassVar[str] = "model.embed_tokens.weight"
    final_norm_name: ClassVar[str] = "model.norm"

    def __init__(self, modules: Modules) -> None:
        self.modules, self.traits = modules, modules.traits
        self.embedding = modules.weight(self.embedding_name)
        self.layers = [self.make_layer(i) for i in modules.layers]
        self.norm = self.make_norm(self.final_norm_name)

    # -- parts
    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and dtype of each buffer: rotary frequencies, kept twice (inv_freq and original_inv_freq)."""
        width = traits.rotary_dim
        return [(name, (width // 2,), "f32") for name in ("inv_freq", "original_inv_freq")] if width else []

    def make_norm(self, name: str) -> Module:
        return RmsNorm(self.modules.weight(f"{name}.weight"), self.norm_spelling)

    def make_layer(self, index: int) -> "Layer":
        raise NotImplementedError

    def embed(self, input_ids: Tensor) -> Tensor:
        return ops.embedding(self.embedding, input_ids)

    # -- forward
    def __call__(
        self,
        input_ids: Tensor,
        run: "RunOptions",
        position_ids: Tensor | None = None,
        cache: "Cache | None" = None,
        inputs_embeds: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Run the backbone; returns the normed hidden states and the cache.

        The arguments that nobody passes stand in the signature as in the class's forward: locals die in that order.
        """
        tape = current()
        inputs_embeds = self.embed(input_ids)
        if run.embeddings_want_grad:
            inputs_embeds.needs_grad = True  # enable_input_require_grads: a leaf
        cache = Cache() if run.keeps_cache else None
        position_ids = add_scalar(Tensor((run.sequence_length,), "i64"))
        position_ids = unsqueeze(position_ids, 0)
        hidden_states, _position_embeds = self.begin(inputs_embeds, position_ids)
        masks: dict[str, Tensor | None] = {}
        if self.mask_kwargs:
            _mask_kwargs = {"inputs_embeds": inputs_embeds, "position_ids": position_ids}
        masks = self.masks(run, inputs_embeds)
        hidden_states = self.after_masks(hidden_states)
        tables = self.position_tables(hidden_states, position_ids)
        for i, layer in enumerate(self.layers):
            step = layer.checkpointed if run.is_checkpointed else layer.forward
            tape.segment("forward", i)
            keywords = {
                "attention_mask": masks[layer.mask_kind],
                "position_embeddings": tables[layer.table_kind],
                "position_ids": position_ids,
                "cache": cache,
            }
            hidden_states = call(step, hidden_states, **{k: keywords[k] for k in self.keyword_order if k in keywords})
            del keywords
            _outputs = hidden_states if self.keeps_outputs else None
            run.end_layer(i)
        tape.segment("head")
        hidden_states = call(self.norm, hidden_states)
        return hidden_states, cache

    def begin(self, inputs_embeds: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what enters the first layer, and position embeddings that the class's forward holds on to."""
        return inputs_embeds, None

    def after_masks(self, hidden_states: Tensor) -> Tensor:
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

    forward: Callable[..., Tensor]
    """Run the layer; each class takes the keywords of its own file."""

    def checkpointed(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        def run(hidden_states: Tensor) -> Tensor:
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

    def end_layer(self, index: int) -> None:
        """Note where a layer's graph ends, so that backward's events are cut at the same place."""
        tape = current()
        if index == len(tape.layer_ends):
            tape.layer_ends.append(tape.next_sequence)
        else:
            tape.layer_ends[index] = tape.next_sequence

    def causal_mask(self, inputs_embeds: Tensor, window: int | None, *, can_skip: bool = True) -> Tensor | None:
        """create_causal_mask and create_sliding_window_causal_mask (transformers/masking_utils.py)."""
        b, s = self.micro_batch_size, self.sequence_length
        padding = None
        if self.padding is None:
            _ask_whether_packed(b, s)
        else:
            padding = ops.to(self.padding, "bool")
        if self.attention == "flash_attention_2":
            window = None  # an argument of the package's kernel, not a mask
        is_windowed = window is not None and s >= window
        if self.attention != "eager" and can_skip and not is_windowed:
            if padding is not None:
                _ask_whether_all(padding)
            return None
        table = _mask_table(b, s, padding, window is not None)
        if self.attention != "eager":
            return table
        zero, least = Tensor((), inputs_embeds.dtype), Tensor((), inputs_embeds.dtype)
        out = Tensor((b, 1, s, s), inputs_embeds.dtype)
        del least, zero, table, padding
        return out


def _ask_whether_packed(b: int, s: int) -> None:
    """find_packed_sequence_indices: differences of the positions, their sum, and whether any is not 1."""
    first = Tensor((b, 1), "i64")
    joined = Tensor((b, s + 1), "i64")
    difference = Tensor((b, s), "i64")
    del joined
    jumps = Tensor((b, s), "bool")
    groups = Tensor((b, s), "i64")
    current().temporaries(8 * b * s)  # CUDA sums truth values as int64, from a copy
    del jumps
    equal = Tensor((b,), "bool")
    answer = Tensor((), "bool")
    del equal, answer, first, difference, groups


def _ask_whether_all(padding: Tensor) -> None:
    total = Tensor((), "i64")
    current().temporaries(8 * numel(padding.shape))
    equal = Tensor((), "bool")
    del total, equal


def _mask_table(b: int, s: int, padding: Tensor | None, has_window: bool) -> Tensor:
    """sdpa_mask: True where a query may attend; [B, 1, S, S] as an expanded view where no padding is known."""
    batch, head = Tensor((b,), "i64"), Tensor((1,), "i64")
    q = add_scalar(Tensor((s,), "i64"))
    kv = add_scalar(Tensor((s,), "i64"))
    one = Tensor((), "bool") if padding is not None else None
    table = _and_masks(s) if has_window else Tensor((1, 1, s, s), "bool")
    if padding is not None:
        causal = table
        allowed = Tensor((1, 1, s, s), "bool")
        del table, causal, one
        num_copied = 2 if b > 1 else 1  # columns, and of several rows theirs
        copies = [Tensor((b, 1, 1, s), "i64") for _ in range(num_copied)]
        index = Tensor((b, 1, 1, s), "bool")
        while copies:
            copies.pop(0)
        table = Tensor((b, 1, s, s), "bool")
        del index, allowed
    del batch, head, q, kv
    return table.view_as((b, 1, s, s), table.strides if padding is not None else (0, *table.strides[1:]))


def _and_masks(s: int) -> Tensor:
    """and_masks of the window's overlay and the causal order."""
    result = Tensor((), "bool")
    edge = Tensor((1, 1, s, 1), "i64")
    overlay = Tensor((1, 1, s, s), "bool")
    del edge
    both = Tensor((1, 1, s, s), "bool")
    del overlay
    result = both
    del both
    causal = Tensor((1, 1, s, s), "bool")
    both = Tensor((1, 1, s, s), "bool")
    del causal
    result = both
    return result  # noqa: RET504


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
