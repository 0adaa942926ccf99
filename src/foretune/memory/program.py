"""The allocation program of a fine-tune: load, prepare, updates.

`record_program` runs a fine-tune on the tape, with a few layers recorded and all emitted.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from foretune.contract import TrainingConfig
from foretune.memory import ops
from foretune.memory.blocks import (
    Linear,
    Linear4bit,
    LoraLinear,
    Module,
    QuantizedWeight,
)
from foretune.memory.decoder import Decoder, Modules, RunOptions
from foretune.memory.families import DECODERS
from foretune.memory.head import HEADS, StockHead
from foretune.memory.kernels import MAX_MICROSTEPS, NUM_UPDATES, AttentionKernels
from foretune.memory.layout import numel
from foretune.memory.optimizers import clip_gradients, make_optimizer
from foretune.memory.stack import StackProfile
from foretune.memory.tape import ITEM_BYTES, Tape, Tensor, backward, drop_graph, recording
from foretune.memory.templates import EMPTY, Recording, StandIns, find_stand_ins
from foretune.models import ModelShape, ParameterSpec, Projection

__all__ = ["TAPE_DTYPES", "emitted_microsteps", "record_program", "record_tape"]

TAPE_DTYPES = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}


def record_program(
    config: TrainingConfig,
    shape: ModelShape,
    stack: StackProfile,
    kernels: AttentionKernels,
    adapted: tuple[Projection, ...],
    *,
    num_updates: int = NUM_UPDATES,
) -> Recording:
    """Record the fine-tune's events: load, preparation and the first updates.

    `adapted` are the projections that carry LoRA. Of an update's microsteps at most three are emitted (first, middle,
    last): the others repeat the middle one.
    """
    num_last = 2 if shape.traits.has_parallel_residual else DECODERS[shape.model_type].num_last_alone
    stand_ins = find_stand_ins(_signatures(shape), num_last=num_last)
    tape = record_tape(config, shape, stack, kernels, adapted, stand_ins, num_updates=num_updates)
    return Recording.of(tape, stand_ins)


def record_tape(
    config: TrainingConfig,
    shape: ModelShape,
    stack: StackProfile,
    kernels: AttentionKernels,
    adapted: tuple[Projection, ...],
    stand_ins: StandIns,
    *,
    num_updates: int = NUM_UPDATES,
) -> Tape:
    """Record the layers that stand for all on a tape; what the interpreter tears down afterwards is not on it."""
    with recording(stack.device_rules()) as tape:
        run = _Run(tape, config, shape, stack, kernels, adapted, stand_ins)
        run.train(num_updates)
        tape.events = tape.events[:]  # the interpreter's tearing down goes into the old list
        vars(run).clear()  # its modules know it, and a cycle would wait for the garbage collector
    return tape


def emitted_microsteps(config: TrainingConfig) -> int:
    """Return how many microsteps of an update are emitted."""
    return min(config.batch.accumulation_steps, MAX_MICROSTEPS)


def _signatures(shape: ModelShape) -> list[object]:
    """Say of each layer what decides its events: parameters, window, rotary embedding."""
    t = shape.traits
    kind_of = {layer: number for number, kind in enumerate(shape.kinds) for layer in kind.layers}
    return [
        (
            kind_of[i],
            t.sliding_layers[i] if t.sliding_layers else False,
            t.rotary_layers[i] if t.rotary_layers else True,
            t.rotary_bases[i] if t.rotary_bases else None,
        )
        for i in range(shape.num_layers)
    ]


class _Named(NamedTuple):
    """A parameter of the recorded model: absolute name, index of the recorded layer, specification."""

    name: str
    layer: int | None
    spec: ParameterSpec
    is_quantized: bool


class _Run:
    """One fine-tune on one tape."""

    def __init__(
        self,
        tape: Tape,
        config: TrainingConfig,
        shape: ModelShape,
        stack: StackProfile,
        kernels: AttentionKernels,
        adapted: tuple[Projection, ...],
        stand_ins: StandIns,
    ) -> None:
        self.tape, self.config, self.shape, self.stack = tape, config, shape, stack
        self.layers, self.dtype = stand_ins.recorded, TAPE_DTYPES[config.precision.dtype]
        self.index_of = {layer: index for index, layer in enumerate(self.layers)}
        self.num_standing_for = Counter(stand_ins.of)
        self.parameters: dict[str, Tensor] = {}
        self.quantized: dict[str, QuantizedWeight] = {}
        self.adapters: dict[str, tuple[Tensor, Tensor]] = {}
        self.kept: list[Any] = []
        self.code_map: Tensor | None = None
        self._load()
        self._prepare(adapted)
        self.decoder = self._build(kernels)
        self.options = self._options()
        self.head = self._make_head(self.options)
        self.trainable = list(self._trainable())
        if stack.empties_cache:
            tape.segment("empty cache")
            tape.events.append((-1, EMPTY))

    # -- load
    def _named(self) -> list[_Named]:
        """The recorded model's parameters in module order."""
        quantizes = self.config.quantization is not None
        kind_of = {layer: kind for kind in self.shape.kinds for layer in kind.layers}
        out = [_Named(spec.name, None, spec, False) for spec in self.shape.before]
        for layer in self.layers:
            prefix = f"{self.shape.layer_prefix}{layer}."
            out += [
                _Named(prefix + spec.name, self.index_of[layer], spec, quantizes and spec.role == "linear")
                for spec in kind_of[layer].parameters
            ]
        return out + [_Named(spec.name, None, spec, False) for spec in self.shape.after]

    def _load(self) -> None:
        tape, named, is_full = self.tape, self._named(), self.config.lora is None
        self.order = named
        if self.stack.has_warmup_block and self.config.quantization is not None:
            tape.temporaries(self._packed_bytes() // 2 * 2)
        if self.stack.load_order == "natural" and self.config.quantization is not None:
            named = sorted(named, key=lambda n: _natural(n.name))
        for name, layer, spec, is_quantized in named:
            tape.segment("load", layer)
            if is_quantized:
                self.quantized[name] = self._quantize(spec.shape)
            else:
                self.parameters[name] = Tensor(spec.shape, self.dtype, needs_grad=is_full)
        family = DECODERS[self.shape.model_type]
        self.buffers: dict[str, Tensor] = {}
        for index, place in enumerate(self.layers):
            for name, shape, dtype in family.layer_buffers(self.shape.traits, self.dtype):
                tape.segment("layer buffers", index)
                self.buffers[f"{self.shape.layer_prefix}{place}.{name}"] = Tensor(shape, dtype)
        tape.segment("buffers")
        for name, shape, dtype in family.buffers(self.shape.traits, self.dtype):
            self.buffers[name] = Tensor(shape, dtype)

    def _packed_bytes(self) -> int:
        """caching_allocator_warmup (transformers/modeling_utils.py): parameters at their packed size, and buffers."""
        item = ITEM_BYTES[self.dtype]
        family = DECODERS[self.shape.model_type]
        buffers = family.buffers(self.shape.traits, self.dtype)
        total = sum(numel(shape) * ITEM_BYTES[dtype] for _, shape, dtype in buffers)
        in_layers = family.layer_buffers(self.shape.traits, self.dtype)
        total += self.shape.num_layers * sum(numel(shape) * ITEM_BYTES[dtype] for _, shape, dtype in in_layers)
        for _, spec in self.shape.parameters():
            total += spec.num_elements // 2 if spec.role == "linear" else spec.num_elements * item
        return total

    def _quantize(self, shape: tuple[int, ...]) -> QuantizedWeight:
        """bitsandbytes' quantize_4bit (functional.py): packed bytes and scales stay, the rest goes."""
        n = numel(shape)
        num_blocks = -(-n // 64)
        quantization = self.config.quantization
        assert quantization is not None
        is_nested, keeps_tables = quantization.uses_double_quant, self.stack.copies_code_tables
        weight = Tensor((n,), self.dtype)
        absmax = Tensor((num_blocks,), "f32")
        packed = Tensor(((n + 1) // 2, 1), "u8")
        code = self._code_table() if keeps_tables else None
        if not is_nested:
            state: tuple[Any, ...] = (Tensor((num_blocks,), "f32"),) if not keeps_tables else (absmax, code)
            del absmax, weight
            return QuantizedWeight(packed, state, shape)
        offset = Tensor((1,), "f32")
        if not keeps_tables:
            codes = Tensor((num_blocks,), "u8"), Tensor((-(-num_blocks // 256),), "f32")
            state = (*codes, Tensor((1,), "f32"))
            del offset, absmax, weight
            return QuantizedWeight(packed, state, shape)
        self.tape.reduction(1, num_blocks, is_inner=True)
        centred = Tensor((num_blocks,), "f32")
        if self.code_map is None:  # kept by the library from the first weight on (functional.py, name2qmap)
            self.code_map = Tensor((256,), "f32")
        scales = Tensor((-(-num_blocks // 256),), "f32")
        codes = Tensor((num_blocks,), "u8"), scales
        state = (*codes, Tensor((256,), "f32"), offset, code)
        del centred, offset, absmax, weight
        return QuantizedWeight(packed, state, shape)

    def _code_table(self) -> Tensor:
        """get_4bit_type: a table of 16 numbers, normed by its largest magnitude."""
        table, magnitudes, largest = Tensor((16,), "f32"), Tensor((16,), "f32"), Tensor((), "f32")
        del magnitudes, largest
        return table

    # -- prepare
    def _prepare(self, adapted: tuple[Projection, ...]) -> None:
        tape, config = self.tape, self.config
        tape.enter("prepare")
        if config.quantization is not None and self.stack.kbit_upcast != "none":
            for name, layer, spec, is_quantized in self.order:
                if not is_quantized and (self.stack.kbit_upcast == "all" or spec.role == "norm"):
                    tape.segment("upcast", layer)
                    self._upcast(self.parameters[name])
        if config.lora is None:
            return
        lora = config.lora
        names = {(projection.name, layer) for projection in adapted for layer in projection.layers}
        tape.component = "adapters"
        for layer in self.layers:
            for projection in adapted:
                if (projection.name, layer) in names and layer in projection.layers:
                    tape.segment("adapters", self.index_of[layer])
                    name = f"{self.shape.layer_prefix}{layer}.{projection.name}"
                    a = Tensor((lora.rank, projection.in_features), self.dtype, needs_grad=True)
                    b = Tensor((projection.out_features, lora.rank), self.dtype, needs_grad=True)
                    self.adapters[name] = (a, b)
        del a, b
        self._cast_adapters(TAPE_DTYPES[config.precision.adapter_dtype])
        tape.component = "weights"
        tape.segment("adapters end")

    def _cast_adapters(self, dtype: str) -> None:
        """PEFT makes adapters in the base's dtype and casts them once all are there (cast_adapter_dtype)."""
        if dtype == self.dtype:
            return
        for name, (a, b) in self.adapters.items():
            layer = int(name.removeprefix(self.shape.layer_prefix).split(".", 1)[0])
            self.tape.segment("adapters cast", self.index_of[layer])
            for matrix in (a, b):
                wide = Tensor(matrix.shape, dtype)
                matrix.storage, matrix.dtype = wide.storage, dtype
                del wide

    def _upcast(self, parameter: Tensor) -> None:
        """param.data = param.data.to(torch.float32) (peft/utils/other.py)."""
        if parameter.dtype != "f32":
            wide = Tensor(parameter.shape, "f32")
            parameter.storage, parameter.dtype = wide.storage, "f32"
            del wide

    # -- structure
    def _build(self, kernels: AttentionKernels) -> Decoder:
        self.tape.component = "activations"
        modules = Modules(
            traits=self.shape.traits,
            layers=self.layers,
            linear=self._linear,
            weight=self.parameters.__getitem__,
            optional=self.parameters.get,
            buffer=self.buffers.__getitem__,
            attention="eager" if self.config.attention == "eager" else "sdpa",
            kernels=kernels,
            prefix=self.shape.layer_prefix,
        )
        return DECODERS[self.shape.model_type](modules)

    def _linear(self, name: str, plain: Callable[..., Module] = Linear) -> Module:
        bias = self.parameters.get(f"{name}.bias")
        base: Module
        if f"{name}.weight" in self.quantized:
            quantization = self.config.quantization
            assert quantization is not None
            base = Linear4bit(
                self.quantized[f"{name}.weight"],
                bias,
                compute_dtype=TAPE_DTYPES[quantization.compute_dtype or self.config.precision.dtype],
                storage_dtype=self.dtype,
                is_nested=quantization.uses_double_quant,
                has_gemm_4bit=self.stack.has_gemm_4bit,
            )
        else:
            base = plain(self.parameters[f"{name}.weight"], bias)
        if name not in self.adapters:
            return base
        lora = self.config.lora
        return LoraLinear(base, *self.adapters[name], lora.dropout if lora else 0.0)

    def _make_head(self, options: RunOptions) -> StockHead:
        weight = self.decoder.embedding
        if not self.shape.tied_embeddings:
            weight = next(self.parameters[spec.name] for spec in self.shape.after if spec.role == "head")
        bias = next((self.parameters[s.name] for s in self.shape.after if s.name.endswith("lm_head.bias")), None)
        head = HEADS[self.config.loss, self.stack.loss]
        decoder, has_softcap = self.decoder, self.shape.traits.final_softcap is not None
        return head(
            lambda input_ids: decoder(input_ids, options),
            weight,
            bias,
            has_softcap=has_softcap,
            is_scaled=self._scales_logits(),
        )

    def _scales_logits(self) -> bool:
        """The chunked loss leaves out a factor of one (runtime/loss.py); the class itself does not."""
        factor = self.shape.traits.logits_factor
        return factor is not None and (self.config.loss != "chunked" or factor != 1)

    def _trainable(self) -> Iterable[tuple[int | None, Tensor]]:
        if self.config.lora is None:
            for name, layer, _, _ in self.order:
                yield layer, self.parameters[name]
            return
        for name, (a, b) in self.adapters.items():
            layer = int(name.removeprefix(self.shape.layer_prefix).split(".", 1)[0])
            yield self.index_of[layer], a
            yield self.index_of[layer], b

    # -- updates
    def train(self, num_updates: int) -> None:
        """Run the updates; what the loop's own variables hold decides what outlives a step."""
        config, stack, tape = self.config, self.stack, self.tape
        optimizer = make_optimizer(config.optimizer, self.trainable)
        is_scaled = config.batch.accumulation_steps > 1 or stack.scales_every_loss
        batch = self._batch() if stack.keeps_batch else None
        outputs: dict[str, Any] | None = None
        loss: Tensor | None = None
        for update in range(num_updates):
            suffix = "" if update == 0 else " (later)"
            if stack.zeroes_grads_first:
                optimizer.zero_grad()
            for _ in range(emitted_microsteps(config)):
                tape.enter(f"forward{suffix}")
                inputs = batch or self._batch()
                self.options.padding = inputs[2] if len(inputs) > 2 else None
                outputs = self.head(inputs[0], inputs[1], f"loss{suffix}")
                loss, outputs = self._take_loss(loss, outputs)
                tape.enter(f"backward{suffix}")
                backward(ops.scale(loss) if is_scaled else loss)
                self.options.padding = None
                if stack.holds_outputs == "no":
                    drop_graph(loss.edge)
                    loss = None
                    while inputs and not batch:
                        inputs.pop(0)
            tape.enter(f"optimizer{suffix}")
            if config.optimizer.max_grad_norm is not None:
                clip_gradients(self.trainable, self.num_standing_for)
            optimizer.step()
            if stack.holds_outputs == "through the update":
                loss, outputs = self._end_update(loss, outputs)
            if not stack.zeroes_grads_first:
                optimizer.zero_grad()
        self.kept += [outputs, loss, optimizer, batch]
        if config.evaluation.is_asked_for and stack.loss == "own":
            self._evaluate()
        tape.enter("save")

    def _evaluate(self) -> None:
        """One batch forward without gradients, checkpointing or dropout."""
        tape = self.tape
        tape.enter("evaluation")
        before = tape.is_grad_enabled, tape.is_training, self.options.is_checkpointed
        tape.is_grad_enabled = tape.is_training = self.options.is_checkpointed = False
        inputs = self._batch()
        outputs = self.head(inputs[0], inputs[1], "evaluation")
        while inputs:
            inputs.pop(0)
        del outputs
        tape.is_grad_enabled, tape.is_training, self.options.is_checkpointed = before

    def _options(self) -> RunOptions:
        config, stack = self.config, self.stack
        checkpoints = config.gradient_checkpointing
        return RunOptions(
            micro_batch_size=config.batch.micro_batch_size,
            sequence_length=config.batch.sequence_length,
            attention="eager" if config.attention == "eager" else "sdpa",
            is_checkpointed=checkpoints,
            embeddings_want_grad=stack.embeddings_want_grad and checkpoints and config.lora is not None,
            keeps_cache=stack.keeps_cache and not checkpoints,
            passes_mask=stack.passes_mask,
        )

    def _batch(self) -> list[Tensor]:
        """Token ids and targets on the device, and a mask where the loop passes one."""
        size = self.config.batch.micro_batch_size, self.config.batch.sequence_length
        ids = Tensor(size, "i64")
        if self.stack.keeps_batch:
            return [ids, ids]
        return [ids, *[Tensor(size, "i64") for _ in range(2 if self.stack.passes_mask else 1)]]

    def _take_loss(self, old: Tensor | None, outputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """loss = outputs.loss: the old loss and its graph go; so do the outputs, unless the loop holds them."""
        graph = old.edge if old is not None else None
        # CPython defers deallocation beyond some 50 nested Python nodes (bitsandbytes' function, 8 layers and more).
        is_deep = self.config.quantization is not None and self.shape.num_layers > 7
        if not is_deep:
            drop_graph(graph)
        old = None
        loss = outputs["loss"]
        if is_deep:
            drop_graph(graph)
        return loss, None if self.stack.holds_outputs == "no" else outputs

    def _end_update(self, loss: Tensor | None, outputs: dict[str, Any] | None) -> tuple[None, None]:
        """The function that made the update returns, and its locals die."""
        if loss is not None:
            drop_graph(loss.edge)
        if outputs is not None:
            outputs.clear()
        return None, None


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
