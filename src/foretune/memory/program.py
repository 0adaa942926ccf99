"""The allocation program of a fine-tune: load, prepare, updates.

`record_program` runs a fine-tune on the tape, with a few layers recorded and all emitted.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from foretune.contract import TrainingConfig
from foretune.memory.blocks import (
    Linear,
    Linear4bit,
    LoraLinear,
    Module,
    QuantizedWeight,
)
from foretune.memory.decoder import Decoder, Modules, RunOptions
from foretune.memory.families import DECODERS
from foretune.memory.fused import fuse, keep_products
from foretune.memory.head import StockHead
from foretune.memory.kernels import NUM_UPDATES, AttentionKernels
from foretune.memory.layout import numel
from foretune.memory.loops import Loop, Prepared, TrainerLoop, TrlLoop
from foretune.memory.losses import make_head
from foretune.memory.optimizers import has_decay
from foretune.memory.stack import StackProfile
from foretune.memory.tape import ITEM_BYTES, Tape, Tensor, recording
from foretune.memory.templates import EMPTY, Recording, StandIns, find_stand_ins
from foretune.models import ModelShape, ParameterSpec, Projection

__all__ = ["TAPE_DTYPES", "record_program", "record_tape"]

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
    is_plain = stack.loss == "own" and config.loss != "liger"
    num_last = 1 if is_plain and not shape.traits.has_parallel_residual else 2
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


def _signatures(shape: ModelShape) -> list[object]:
    """Say of each layer what decides its events: parameters, window, rotary embedding."""
    t = shape.traits
    kind_of = {layer: number for number, kind in enumerate(shape.kinds) for layer in kind.layers}
    return [
        (
            kind_of[i],
            t.sliding_layers[i] if t.sliding_layers else False,
            t.rotary_layers[i] if t.rotary_layers else True,
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
        tape.is_reentrant = stack.checkpoint_form == "reentrant"
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
        self.products: list[Tensor] = []
        self.decoder = self._build(kernels)
        options = self._options()
        self.loop = self._make_loop(options, self._make_head(options))
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
        is_read_onto_device = self.config.quantization is not None or self.stack.loads_onto_device
        if self.stack.has_warmup_block and is_read_onto_device:
            tape.temporaries(self._packed_bytes() // 2 * 2)
        if self.stack.load_order == "natural" and is_read_onto_device:
            named = sorted(named, key=lambda n: _natural(n.name))
        for name, layer, spec, is_quantized in named:
            tape.segment("load", layer)
            if is_quantized:
                self.quantized[name] = self._quantize(spec.shape)
            else:
                self.parameters[name] = Tensor(spec.shape, self.dtype, needs_grad=is_full)
        tape.segment("buffers")
        family = DECODERS[self.shape.model_type]
        self.buffers = {
            name: Tensor(shape, dtype) for name, shape, dtype in family.buffers(self.shape.traits, self.dtype)
        }

    def _packed_bytes(self) -> int:
        """caching_allocator_warmup (transformers/modeling_utils.py): parameters at their packed size, and buffers."""
        item = ITEM_BYTES[self.dtype]
        family = DECODERS[self.shape.model_type]
        buffers = family.buffers(self.shape.traits, self.dtype)
        total = sum(numel(shape) * ITEM_BYTES[dtype] for _, shape, dtype in buffers)
        quantizes = self.config.quantization is not None
        for _, spec in self.shape.parameters():
            is_packed = quantizes and spec.role == "linear"
            total += spec.num_elements // 2 if is_packed else spec.num_elements * item
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
            self._prepare_kbit()
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
        self._cast_adapters(TAPE_DTYPES[config.precision.adapter_dtype], "adapters cast")
        if self.stack.casts_adapters and config.quantization is not None:
            self._cast_adapters("bf16", "adapters cast again")
        tape.component = "weights"
        tape.segment("adapters end")

    def _cast_adapters(self, dtype: str, kind: str) -> None:
        """PEFT makes adapters in the base's dtype and casts them once all are there (cast_adapter_dtype)."""
        for name, (a, b) in self.adapters.items():
            layer = int(name.removeprefix(self.shape.layer_prefix).split(".", 1)[0])
            self.tape.segment(kind, self.index_of[layer])
            for matrix in (a, b):
                _move(matrix, dtype)

    def _prepare_kbit(self) -> None:
        """prepare_model_for_kbit_training (peft/utils/other.py), and what TRL turns back after it."""
        for name, layer, _, is_quantized in self.order:
            if not is_quantized:
                self.tape.segment("upcast", layer)
                _move(self.parameters[name], "f32")
        if self.stack.kbit_upcast == "norms":
            self.tape.segment("turned back")
            for name, _, spec, _ in self.order:
                if name in self.parameters and (spec.role in ("embedding", "head") or name.endswith("lm_head.bias")):
                    _move(self.parameters[name], self.dtype)

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
        decoder = DECODERS[self.shape.model_type](modules)
        fuse(decoder, self.stack)
        if self.config.gradient_checkpointing and self.shape.model_type in self.stack.caches_though_checkpointed:
            keep_products(decoder, self.products)
        return decoder

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
        decoder, has_softcap = self.decoder, self.shape.traits.final_softcap is not None
        return make_head(
            self.config.loss,
            self.stack,
            self.shape.model_type,
            lambda input_ids: decoder(input_ids, options),
            weight,
            bias,
            has_softcap=has_softcap,
        )

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
        """Run the updates by the stack's loop."""
        self.loop.train(num_updates)

    def _make_loop(self, options: RunOptions, head: StockHead) -> Loop:
        trainer = TrlLoop if self.stack.loss_kernel == "trl" else TrainerLoop
        kind = trainer if self.stack.collects_batches else Loop
        named = [(self.parameters[n.name], n.spec) for n in self.order if n.name in self.parameters]
        prepared = Prepared(
            head=head,
            options=options,
            trainable=list(self._trainable()),
            undecayed=frozenset(id(t) for t, spec in named if not has_decay(spec)),
            embeddings=frozenset(id(t) for t, spec in named if spec.role == "embedding"),
            num_standing_for=self.num_standing_for,
            # some 50 nested Python nodes: bitsandbytes' function, 8 layers and more
            is_deep=self.config.quantization is not None and self.shape.num_layers > 7,
            shifts_labels=self.decoder.has_causal_name,
            products=self.products,
        )
        return kind(self.config, self.stack, prepared)

    def _options(self) -> RunOptions:
        config, stack = self.config, self.stack
        checkpoints = config.gradient_checkpointing
        return RunOptions(
            micro_batch_size=config.batch.micro_batch_size,
            sequence_length=config.batch.sequence_length,
            attention=config.attention,
            is_checkpointed=checkpoints,
            embeddings_want_grad=stack.embeddings_want_grad and checkpoints and config.lora is not None,
            keeps_cache=stack.keeps_cache and not checkpoints,
            passes_mask=stack.passes_mask,
        )


def _move(parameter: Tensor, dtype: str) -> None:
    """param.data = param.data.to(dtype)."""
    if parameter.dtype != dtype:
        moved = Tensor(parameter.shape, dtype)
        parameter.storage, parameter.dtype = moved.storage, dtype
        del moved


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
