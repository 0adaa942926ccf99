"""Decoders whose forward has an order of its own, and layers that hand on their attention weights.

A class's `prologue` runs everything before its layers and returns what the forward holds to its end: a dictionary,
whose values die in the order in which they were put in.
"""

from typing import Any, ClassVar

from foretune.memory.blocks import Module, call
from foretune.memory.decoder import Cache, Modules, RunOptions
from foretune.memory.families.classic import LayerNormDecoder
from foretune.memory.tape import Tensor, current

__all__ = ["ScopedDecoder"]


class ScopedDecoder(LayerNormDecoder):
    """A decoder that says itself what its forward holds."""

    returns_tuples: ClassVar[bool] = False
    """Layers return their attention weights too, and the loop's local holds both."""

    def __init__(self, modules: Modules) -> None:
        super().__init__(modules)
        self.last: list[Module] = [self.norm]

    def prologue(self, input_ids: Tensor, run: RunOptions, cache: Cache | None) -> tuple[Tensor, dict[str, Any]]:
        """Return what enters the first layer, and what the forward holds; layers take their keywords from there."""
        raise NotImplementedError

    def __call__(
        self,
        input_ids: Tensor,
        run: RunOptions,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Any = None,
    ) -> tuple[Tensor, Any]:
        tape = current()
        cache = Cache() if run.keeps_cache else None
        hidden_states, scope = self.prologue(input_ids, run, cache)
        for i, layer in enumerate(self.layers):
            step = layer.checkpointed if run.is_checkpointed else layer.forward
            tape.segment("forward", i)
            keywords = self._keywords(scope, cache)
            if self.returns_tuples:
                outputs = call(step, hidden_states, **keywords)
                hidden_states = outputs[0]
            else:
                hidden_states = call(step, hidden_states, **keywords)
            del keywords
            run.end_layer(i)
        tape.segment("head")
        for module in self.last:
            hidden_states = call(module, hidden_states)
        return hidden_states, cache

    def _keywords(self, scope: dict[str, Any], cache: Cache | None) -> dict[str, Any]:
        """A comprehension in the forward itself would make these names cells, which die last."""
        return {name: scope.get(name, cache) for name in self.keyword_order}

    def embedded(self, input_ids: Tensor, run: RunOptions) -> Tensor:
        """The embedding's output; a leaf where its gradient is wanted."""
        inputs_embeds = self.embed(input_ids)
        if run.embeddings_want_grad:
            inputs_embeds.needs_grad = True
        return inputs_embeds
