"""The allocation program of a fine-tune: load, prepare, updates.

`record_program` runs a fine-tune on the tape, with a few layers recorded and all emitted.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from foretune.contract import TrainingConfig
from foretune.memory.adapters import Adapter, DoraLinear, LoraLinear
from foretune.memory.blocks import Conv1d, Linear, Module
from foretune.memory.decoder import Decoder, Modules, RunOptions
from foretune.memory.families import decoder_of
from foretune.memory.families.litgpt import LitGptAdapter
from foretune.memory.families.litgpt_head import LitGptHead
from foretune.memory.fused import fuse, keep_products
from foretune.memory.head import StockHead
from foretune.memory.kernels import NUM_UPDATES, AttentionKernels
from foretune.memory.layout import numel
from foretune.memory.loops import Loop, Prepared, TrainerLoop, TrlLoop
from foretune.memory.losses import make_head
from foretune.memory.optimizers import has_decay
from foretune.memory.quantized import Linear4bit, Quantizer4bit, Quantizer8bit
from foretune.memory.stack import StackProfile
from foretune.memory.tape import ITEM_BYTES, Tape, Tensor, recording
from foretune.memory.templates import EMPTY, Recording, StandIns, find_stand_ins
from foretune.models import OUTSIDE, BufferSpec, LayerKind, ModelShape, ParameterSpec, Projection

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
    num_last = decoder_of(shape).num_last_alone
    if not is_plain or shape.traits.has_parallel_residual:
        num_last = max(num_last, 2)
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
    t, tags = shape.traits, decoder_of(shape).layer_tags(shape)
    kind_of = {layer: number for number, kind in enumerate(shape.kinds) for layer in kind.layers}
    return [
        (
            kind_of[i],
            t.sliding_layers[i] if t.sliding_layers else False,
            t.rotary_layers[i] if t.rotary_layers else True,
            t.sparse_layers[i] if t.sparse_layers else False,
            tags[i],
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
        self.family = decoder_of(shape)
        tape.is_reentrant = stack.checkpoint_form == "reentrant"
        self.layers, self.dtype = stand_ins.recorded, TAPE_DTYPES[config.precision.dtype]
        self.index_of = {layer: index for index, layer in enumerate(self.layers)}
        self.num_standing_for = Counter(stand_ins.of)
        self.parameters: dict[str, Tensor] = {}
        self.quantized: dict[str, Any] = {}
        self.adapters: dict[str, Adapter] = {}
        self.saved: set[str] = set()
        self.kept: list[Any] = []
        self.quantizer = self._quantizer()
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
        out = self._in_towers(is_before=True)
        out += [_Named(spec.name, None, spec, quantizes and spec.role == "linear") for spec in self.shape.before]
        for layer in self.layers:
            prefix = f"{self.shape.layer_prefix}{layer}."
            out += [
                _Named(prefix + spec.name, self.index_of[layer], spec, quantizes and spec.role == "linear")
                for spec in kind_of[layer].parameters
            ]
        after = [_Named(spec.name, None, spec, False) for spec in self.shape.after]
        inside = [named for named in after if named.spec.role != "head"]
        return out + inside + self._in_towers(is_before=False) + after[len(inside) :]

    def _in_towers(self, *, is_before: bool) -> list[_Named]:
        """Parameters of the towers that stand before the language model, or after it; the head comes last."""
        quantizes = self.config.quantization is not None
        return [
            _Named(spec.name, None, spec, quantizes and spec.role == "linear")
            for tower in self.shape.towers
            if tower.is_before == is_before
            for spec in tower.parameters
        ]

    def _load(self) -> None:
        tape, named, is_full = self.tape, self._named(), self.config.lora is None
        in_towers = {spec.name for tower in self.shape.towers for spec in tower.parameters}
        self.order = named
        is_read_onto_device = self.config.quantization is not None or self.stack.loads_onto_device
        if self.stack.has_warmup_block and is_read_onto_device:
            tape.temporaries(self._packed_bytes() // 2 * 2)
        if self.stack.load_order == "natural" and is_read_onto_device:
            named = sorted(named, key=lambda n: _natural(n.name))
        for name, layer, spec, is_quantized in named:
            tape.segment("load", layer)
            if is_quantized:
                assert self.quantizer is not None
                packed_from = "f16" if self.shape.code == "litgpt" else self._dtype_of(spec)
                self.quantized[name] = self.quantizer.load(spec.shape, packed_from)
            else:
                wants_grad = is_full and not spec.is_frozen and name not in in_towers
                self.parameters[name] = Tensor(spec.shape, self._dtype_of(spec), needs_grad=wants_grad)
        self.buffers: dict[str, Tensor] = {}
        self._load_tower_buffers(is_before=True)
        family = self.family
        kind_of = {layer: kind for kind in self.shape.kinds for layer in kind.layers}
        for layer in self.layers:
            for name, size, dtype in _layer_buffers(family, self.shape, kind_of[layer], self.dtype):
                tape.segment("layer buffers", self.index_of[layer])
                self.buffers[f"{self.shape.layer_prefix}{layer}.{name}"] = Tensor(size, dtype)
        tape.segment("buffers")
        for name, size, dtype in family.buffers(self.shape.traits, self.dtype):
            self.buffers[name] = Tensor(size, dtype)
        self._load_tower_buffers(is_before=False)

    def _load_tower_buffers(self, *, is_before: bool) -> None:
        self.tape.segment("tower buffers")
        for tower in self.shape.towers:
            if tower.is_before == is_before:
                for buffer in tower.buffers:
                    self.buffers[buffer.name] = Tensor(buffer.shape, self._buffer_dtype(buffer))

    def _buffer_dtype(self, buffer: BufferSpec) -> str:
        return {"fp32": "f32", "int64": "i64"}.get(buffer.dtype, self.dtype)

    def _dtype_of(self, spec: ParameterSpec) -> str:
        is_kept = spec.name in self.family.parameters_in_32bit
        return "f32" if is_kept else self.dtype

    def _quantizer(self) -> Quantizer4bit | Quantizer8bit | None:
        settings = self.config.quantization
        if settings is None:
            return None
        if settings.scheme == "int8":
            return Quantizer8bit()
        compute_dtype = TAPE_DTYPES[settings.compute_dtype_for(self.config.precision)]
        return Quantizer4bit(settings, self.stack, compute_dtype)

    def _packed_bytes(self) -> int:
        """caching_allocator_warmup (transformers/modeling_utils.py): parameters at their packed size, and buffers."""
        settings = self.config.quantization
        per_byte = 1 if settings is not None and settings.scheme == "int8" else 2
        family = self.family
        buffers = family.buffers(self.shape.traits, self.dtype)
        for kind in self.shape.kinds:
            buffers += _layer_buffers(family, self.shape, kind, self.dtype) * len(kind.layers)
        total = sum(numel(shape) * ITEM_BYTES[dtype] for _, shape, dtype in buffers)
        quantizes = self.config.quantization is not None
        specs = [spec for _, spec in self.shape.parameters()]
        for tower in self.shape.towers:
            specs += tower.parameters
            total += sum(numel(b.shape) * ITEM_BYTES[self._buffer_dtype(b)] for b in tower.buffers)
        for spec in specs:
            item = ITEM_BYTES[self._dtype_of(spec)]
            is_packed = quantizes and spec.role == "linear"
            total += spec.num_elements // per_byte if is_packed else spec.num_elements * item
        return total

    # -- prepare
    def _prepare(self, adapted: tuple[Projection, ...]) -> None:
        tape, config = self.tape, self.config
        tape.enter("prepare")
        if config.quantization is not None and self.stack.kbit_upcast != "none":
            self._prepare_kbit()
        if config.lora is None:
            return
        lora = config.lora
        kind_of = {layer: kind for kind in self.shape.kinds for layer in kind.layers}
        tape.component = "adapters"
        if self.shape.code == "litgpt":
            self._adapt_litgpt(adapted, lora.rank)
        for layer in self.layers if self.shape.code == "transformers" else ():
            here = {f"{projection.name}.weight": projection for projection in adapted if layer in projection.layers}
            for projection in [here[spec.name] for spec in kind_of[layer].parameters if spec.name in here]:
                tape.segment("adapters", self.index_of[layer])
                name = f"{self.shape.layer_prefix}{layer}.{projection.name}"
                adapter = Adapter(projection.in_features, projection.out_features, lora.rank, self.dtype)
                if lora.use_dora:
                    adapter.measure(self._base(name, Linear if projection.is_quantizable else Conv1d))
                self.adapters[name] = adapter
        self._save_modules(lora.modules_to_save)
        self._cast_adapters(TAPE_DTYPES[config.precision.adapter_dtype], "adapters cast")
        if self.stack.casts_adapters and config.quantization is not None:
            self._cast_adapters("bf16", "adapters cast again")
        tape.component = "weights"
        tape.segment("adapters end")

    def _adapt_litgpt(self, adapted: tuple[Projection, ...], rank: int) -> None:
        """One pair of matrices for each linear layer, whose parts may be enabled one by one."""
        for layer in (OUTSIDE, *self.layers):
            modules: dict[str, list[Projection]] = {}
            for projection in adapted:
                if layer in projection.layers:
                    modules.setdefault(projection.part_of or projection.name, []).append(projection)
            for module, parts in modules.items():
                self.tape.segment("adapters", self.index_of.get(layer))
                name = module if layer == OUTSIDE else f"{self.shape.layer_prefix}{layer}.{module}"
                widths, is_fused = tuple(part.out_features for part in parts), parts[0].part_of is not None
                self.adapters[name] = LitGptAdapter(parts[0].in_features, widths, rank, self.dtype, is_fused=is_fused)

    def _save_modules(self, names: tuple[str, ...]) -> None:
        """PEFT trains a copy of each module whose name ends so, and keeps the original (ModulesToSaveWrapper)."""
        if not names:
            return
        for name, layer, _, _ in self.order:
            if name.rpartition(".")[0].endswith(names):
                self.tape.segment("saved", layer)
                self._copy(self.parameters, name, needs_grad=True)
                self.saved.add(name)
                if "embed_scale" in self.buffers and name == self.family.embedding_name:
                    self._copy(self.buffers, "embed_scale")
        self.tape.segment("saved end")

    def _copy(self, among: dict[str, Tensor], name: str, *, needs_grad: bool = False) -> None:
        """Put a copy in a tensor's place, which is kept."""
        original = among[name]
        self.kept.append(original)
        among[name] = Tensor(original.shape, original.dtype, original.strides, needs_grad=needs_grad)

    def _cast_adapters(self, dtype: str, kind: str) -> None:
        """PEFT makes adapters in the base's dtype and casts them once all are there (cast_adapter_dtype)."""
        for name, adapter in self.adapters.items():
            self.tape.segment(kind, self._index_in(name))
            adapter.cast(dtype)

    def _index_in(self, name: str) -> int | None:
        """Return the index of the recorded layer that a module belongs to; None: it is outside the layers."""
        inside = name.removeprefix(self.shape.layer_prefix)
        return None if inside == name else self.index_of[int(inside.split(".", 1)[0])]

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
            weight=lambda name: self.parameters[self._actual(name)],
            optional=lambda name: self.parameters.get(self._actual(name)),
            has=self._has_linear,
            buffer=self.buffers.__getitem__,
            attention="eager" if self.config.attention == "eager" else "sdpa",
            kernels=kernels,
            prefix=self.shape.layer_prefix,
            model_type=self.shape.model_type,
            code=self.stack.model_code,
            is_quantized=self.config.quantization is not None,
        )
        decoder = self.family(modules)
        fuse(decoder, self.stack)
        if self.config.gradient_checkpointing and self.shape.model_type in self.stack.caches_though_checkpointed:
            keep_products(decoder, self.products)
        return decoder

    def _actual(self, name: str) -> str:
        """The name of a parameter outside the layers, which families call `model.` whatever stands around it."""
        root = self.shape.layer_prefix.removesuffix("layers.")
        if name in self.parameters or not name.startswith("model.") or name.startswith(root):
            return name
        return root + name.removeprefix("model.")

    def _has_linear(self, name: str) -> bool:
        return f"{name}.weight" in self.parameters or f"{name}.weight" in self.quantized

    def _base(self, name: str, plain: Callable[..., Module] = Linear) -> Module:
        bias = self.parameters.get(f"{name}.bias")
        if f"{name}.weight" not in self.quantized:
            return plain(self.parameters[f"{name}.weight"], bias)
        assert self.quantizer is not None
        layer = self.quantizer.linear(self.quantized[f"{name}.weight"], bias)
        if self.shape.code == "litgpt" and isinstance(layer, Linear4bit):
            layer.keeps_input = True
        return layer

    def _linear(self, name: str, plain: Callable[..., Module] = Linear) -> Module:
        base, lora = self._base(name, plain), self.config.lora
        if lora is None or name not in self.adapters:
            return base
        adapter = self.adapters[name]
        if isinstance(adapter, LitGptAdapter):
            return adapter.around(base, lora.dropout, self.shape.traits, self.stack.model_code)
        layer = DoraLinear if lora.use_dora else LoraLinear
        return layer(base, adapter, lora.dropout)

    def _make_head(self, options: RunOptions) -> StockHead | LitGptHead:
        decoder, has_softcap = self.decoder, self.shape.traits.final_softcap is not None
        if self.shape.code == "litgpt":
            return LitGptHead(
                lambda input_ids: decoder(input_ids, options),
                self._linear("lm_head"),
                is_chunked=self.config.lora is not None,
                has_softcap=has_softcap,
            )
        weight = self.decoder.embedding
        if not self.shape.tied_embeddings:
            weight = next(self.parameters[spec.name] for spec in self.shape.after if spec.role == "head")
        bias = next((self.parameters[s.name] for s in self.shape.after if s.name.endswith("lm_head.bias")), None)
        head = make_head(
            self.config.loss,
            self.stack,
            self.shape.model_type,
            lambda input_ids: decoder(input_ids, options),
            weight,
            bias,
            has_softcap=self.shape.traits.final_softcap is not None and decoder.caps_logits,
            is_scaled=self._scales_logits()
            or decoder.scales_logits
            or (decoder.scales_before_head and self.config.loss == "chunked"),
            in_32bit=decoder.logits_in_32bit,
            prepared=decoder.head_weight,
        )
        head.scales_input = decoder.scales_before_head
        return head

    def _scales_logits(self) -> bool:
        """The chunked loss leaves out a factor of one (runtime/loss.py); the class itself does not."""
        factor = self.shape.traits.logits_factor
        return factor is not None and (self.config.loss != "chunked" or factor != 1)

    def _trainable(self) -> Iterable[tuple[int | None, Tensor]]:
        is_full = self.config.lora is None
        in_towers = {spec.name for tower in self.shape.towers for spec in tower.parameters}
        for name, layer, spec, _ in self.order:
            if (is_full and not spec.is_frozen and name not in in_towers) or name in self.saved:
                yield layer, self.parameters[name]
            elif name.endswith(".weight") and name.removesuffix(".weight") in self.adapters:
                for parameter in self.adapters[name.removesuffix(".weight")].parameters():
                    yield layer, parameter

    # -- updates
    def train(self, num_updates: int) -> None:
        """Run the updates by the stack's loop."""
        self.loop.train(num_updates)

    def _make_loop(self, options: RunOptions, head: StockHead | LitGptHead) -> Loop:
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


def _layer_buffers(
    family: type[Decoder], shape: ModelShape, kind: LayerKind, dtype: str
) -> list[tuple[str, tuple[int, ...], str]]:
    names = frozenset(parameter.name for parameter in kind.parameters)
    return family.layer_buffers(shape.traits, names, dtype)


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
