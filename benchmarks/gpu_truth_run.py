"""What gpu_truth.py starts: name the machine, trace configurations without a GPU, or measure one on it.

    python benchmarks/gpu_truth_run.py probe --out FILE
    python benchmarks/gpu_truth_run.py trace NAME... --device JSON --out FILE
    python benchmarks/gpu_truth_run.py measure NAME --out FILE

Measuring runs the runtime's own step; only loading is written here, in the order that the trace assumes. Nothing at
the borders of phases allocates on the device: the counters of the allocator are read, and its peaks set back.
"""

import argparse
import gc
import importlib
import json
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpu_truth import CASES, MODELS, Case  # first: it makes foretune importable
from gpu_truth_events import ACTIONS, packed, packed_text, replayed

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.memory.figures import facts_of
from foretune.memory.kernels import NUM_UPDATES
from foretune.memory.stack import FORETUNE, StackProfile
from foretune.models import ModelShape, shape_from_config
from foretune.runtime.libraries import installed_versions

DEVICE = "cuda"
ROWS = 2
MAX_HISTORY = 1_000_000
NOTED = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "numpy", "triton", "huggingface_hub")


def config_of(case: Case) -> TrainingConfig:
    """The configuration as the contract has it."""
    batch = {"micro_batch_size": ROWS, "sequence_length": case.tokens, "accumulation_steps": case.accumulation_steps}
    fields = {"model": {"id": f"truth/{case.model}"}, "precision": {"dtype": case.dtype}, "batch": batch}
    return TrainingConfig.create(**{**fields, **case.fields})


def shape_of(case: Case) -> ModelShape:
    """The model's shape by its config alone."""
    return shape_from_config(MODELS[case.model], id=f"truth/{case.model}", source="file")


def bridge_versions() -> list[str]:
    """Give older libraries the names that the runtime calls; says what was bridged."""
    bridged = []
    registrations: Any = importlib.import_module("torch._meta_registrations")
    if not hasattr(registrations, "_create_grouped_mm_output_tensor"):  # experts only; none is measured here
        registrations._create_grouped_mm_output_tensor = None
        bridged.append("no grouped matrix products on meta")
    return bridged


@contextmanager
def called_as(case: Case) -> Iterator[None]:
    """Let the step call the model as the stock Trainer would, with a mask, where the configuration is padded."""
    if not case.is_padded:
        yield
        return
    import torch
    from torch import Tensor

    from foretune.runtime.loss import token_loss_sum
    from foretune.runtime.step import TrainingStep

    def forward(self: TrainingStep, input_ids_BS: Tensor, targets_BS: Tensor, _: None) -> Tensor:
        mask_BS = torch.ones_like(input_ids_BS)
        mask_BS[0, -(case.tokens // 4) :] = 0
        return token_loss_sum(
            self.model(input_ids=input_ids_BS, attention_mask=mask_BS, use_cache=False).logits, targets_BS
        )

    with patch.object(TrainingStep, "forward", forward):
        yield


# -- the machine
def probe() -> dict[str, Any]:
    """Name the versions and the GPU; `because` says why there is none."""
    import torch

    if not torch.cuda.is_available():
        return {"because": f"torch {torch.__version__} sees none"}
    device = torch.cuda.get_device_properties(0)
    capability = f"{device.major}.{device.minor}"
    return {
        "device": {"name": device.name, "compute_capability": capability, "total_bytes": device.total_memory},
        "versions": {name: _version(name) for name in NOTED},
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "torch_revision": torch.version.git_version,
        "driver": nvml(lambda ml, handle: _text(ml.nvmlSystemGetDriverVersion())),
        "used_before_bytes": nvml(lambda ml, handle: ml.nvmlDeviceGetMemoryInfo(handle).used),
        "sdpa_order": [str(backend) for backend in getattr(torch._C, "_get_sdp_priority_order", list)()],
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _text(words: Any) -> str:
    return words.decode() if isinstance(words, bytes) else str(words)


def nvml(read: Any) -> Any:
    """Read something from the driver's library; None where that cannot be had."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return read(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
    except Exception:  # any of its errors, and a missing module
        return None


def process_bytes() -> list[int | None] | None:
    """What the driver says each process on the GPU holds."""

    def read(ml: Any, handle: Any) -> list[int | None]:
        return [process.usedGpuMemory for process in ml.nvmlDeviceGetComputeRunningProcesses(handle)]

    found: list[int | None] | None = nvml(read)
    return found


# -- the trace
def trace(case: Case, device: dict[str, Any]) -> dict[str, Any]:
    """Trace a configuration for the stack that is installed; nothing here touches a GPU."""
    import torch

    bridged = bridge_versions()
    from foretune.runtime.trace import trace_memory

    stack = FORETUNE.with_(**{name: text or "not installed" for name, text in installed_versions().items()})
    if not hasattr(torch.Tensor, "_use_count"):
        stack = stack.with_(sums_in_place=False)
        bridged.append("sums of gradients are taken to be out of place")
    spec = DeviceSpec(
        name=device["name"],
        total_bytes=device["total_bytes"],
        total_is="reported",
        vendor="NVIDIA",
        compute_capability=device["compute_capability"],
        platform="linux",
    )
    start = time.monotonic()
    with called_as(case), answered_as(case):
        made = trace_memory(config_of(case), shape_of(case), MODELS[case.model], spec, stack=stack)
    program = made.program
    result = replayed(program.events, program.marks, is_expandable=case.is_expandable)
    ends = (*program.marks, len(program.events))
    labels = [f"{birth.name} {list(birth.shape)} {birth.dtype}" for birth in made.births]
    table = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return {
        "stack": described(stack, spec),
        "bridged": bridged,
        "seconds": round(time.monotonic() - start, 2),
        "allocated_bytes": result.allocated_peak,
        "reserved_bytes": result.reserved_peak,
        "requested_bytes": made.estimate.requested_bytes,
        "peak_phase": made.estimate.peak_phase,
        "attention_kernel": traced_kernels(labels) or made.estimate.attention_kernel,
        "components": {component.name: component.num_bytes for component in made.estimate.components},
        "phases": [
            {
                "phase": name,
                "num_events": end,
                "allocated_peak_bytes": phase.allocated_peak,
                "reserved_peak_bytes": phase.reserved_peak,
                "allocated_end_bytes": phase.allocated_end,
                "reserved_end_bytes": phase.reserved_end,
            }
            for name, end, phase in zip(program.phases, ends, result.phases, strict=True)
        ],
        "slots": packed(slot for slot, _ in program.events),
        "sizes": packed(size for _, size in program.events),
        "kinds": packed(table[label] for label in labels),
        "names": packed_text(list(table)),
    }


def traced_kernels(labels: list[str]) -> str:
    """Name the attention operators that ran; empty for eager attention and torch's math, which are none."""
    words = (label.split()[0] for label in labels)
    found = {word.split(".")[1] for word in words if "scaled_dot_product" in word and "backward" not in word}
    return "sdpa: " + ", ".join(sorted(found)) if found else ""


def described(stack: StackProfile, device: DeviceSpec) -> str:
    """Name the profile as it is on this device."""
    on_device = stack.on(device)
    return f"{on_device.description}; cuBLAS {on_device.cublas_bytes:,} B, cublasLt {on_device.cublaslt_bytes:,} B"


@contextmanager
def answered_as(case: Case) -> Iterator[None]:
    """Answer what a trace reads off a mask: there is padding."""
    from foretune.runtime.trace.recorder import Recorder

    original = Recorder._answer

    def answer(self: Recorder, tensor: Any) -> Any:
        return False if case.is_padded and str(tensor.dtype) == "torch.bool" else original(self, tensor)

    with patch.object(Recorder, "_answer", answer):
        yield


# -- the measurement
class Meter:
    """Reads the allocator's counters where a phase ends."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.phase, self.suffix, self.in_backward = "load", "", False
        self.ended: list[dict[str, Any]] = []
        self.emptied_at = -1

    def counters(self) -> dict[str, Any]:
        """The allocator's counters; no kernel and no allocation."""
        found: dict[str, Any] = self.torch.cuda.memory_stats()
        return found

    def num_events(self) -> int:
        """How many allocations and frees there were."""
        found = self.counters()
        return int(found["allocation.all.allocated"] + found["allocation.all.freed"])

    def enter(self, phase: str) -> None:
        """Begin a phase, unless it is the one that runs."""
        if phase != self.phase:
            self.end()
            self.phase = phase

    def end(self) -> None:
        """End the phase that runs."""
        found, cuda = self.counters(), self.torch.cuda
        free, total = cuda.mem_get_info()
        self.ended.append(
            {
                "phase": self.phase,
                "num_events": int(found["allocation.all.allocated"] + found["allocation.all.freed"]),
                "allocated_peak_bytes": found["allocated_bytes.all.peak"],
                "reserved_peak_bytes": found["reserved_bytes.all.peak"],
                "allocated_end_bytes": found["allocated_bytes.all.current"],
                "reserved_end_bytes": found["reserved_bytes.all.current"],
                "requested_end_bytes": found.get("requested_bytes.all.current"),
                "outside_allocator_bytes": total - free - found["reserved_bytes.all.current"],
                "num_retries": found.get("num_alloc_retries"),
            }
        )
        cuda.reset_peak_memory_stats()


class Run:
    """One fine-tune on the GPU, arranged as the trace's."""

    def __init__(self, case: Case, meter: Meter) -> None:
        from foretune.runtime.load import DTYPES, build_model, model_config
        from foretune.runtime.step import TrainingStep

        self.case, self.meter, self.config = case, meter, config_of(case)
        self.dtype = DTYPES[self.config.precision.dtype]
        made = model_config(MODELS[case.model], attention=self.config.attention)
        self.base: Any = build_model(made, dtype=self.dtype, device="meta", attention=self.config.attention)
        self.step = TrainingStep(self.base, self.base, is_chunked=self.config.loss == "chunked")
        self.load()
        meter.enter("prepare")
        self.step.model = self.prepare()
        self.trained = [parameter for parameter in self.step.model.parameters() if parameter.requires_grad]
        self.base.get_output_embeddings().register_forward_pre_hook(self.enter_loss)
        gc.collect()
        meter.emptied_at = meter.num_events()
        meter.torch.cuda.empty_cache()

    def load(self) -> None:
        """Random parameters in module order, quantized as they come; then buffers."""
        import torch

        from foretune.runtime.load import decoder_linears

        linears = decoder_linears(self.base) if self.config.quantization is not None else {}
        for name, parameter in list(self.base.named_parameters()):
            owner = name.removesuffix(".weight")
            if owner in linears and name.endswith(".weight"):
                self.quantize(owner, linears[owner])
            else:
                made = torch.nn.Parameter(filled(parameter.shape, parameter.dtype), requires_grad=True)
                for module in self.base.modules():  # a tied one stands in two
                    for key, held in module._parameters.items():
                        if held is parameter:
                            module._parameters[key] = made
        for module in self.base.modules():
            meta = [key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
            for key in meta:
                module._buffers[key] = torch.empty_like(module._buffers[key], device=DEVICE)
            if meta:
                self.base._init_weights(module)  # rotary frequencies, computed on the CPU
        if self.config.quantization is not None:
            self.base.is_loaded_in_4bit = True  # PEFT asks for these two
            self.base.quantization_method = "bitsandbytes"

    def quantize(self, name: str, linear: Any) -> None:
        """Put a 4-bit layer in a linear's place."""
        from foretune.runtime.load import DTYPES

        bnb: Any = importlib.import_module("bitsandbytes")
        settings = self.config.quantization
        assert settings is not None
        made = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=DTYPES[settings.compute_dtype_for(self.config.precision)],
            compress_statistics=settings.uses_double_quant,
            quant_type=settings.scheme,
            device="meta",
        )
        made.bias = linear.bias
        made.weight = bnb.nn.Params4bit(
            filled(linear.weight.shape, linear.weight.dtype),
            requires_grad=False,
            compress_statistics=settings.uses_double_quant,
            quant_type=settings.scheme,
            module=made,
        ).to(DEVICE)
        parent, _, child = name.rpartition(".")
        setattr(self.base.get_submodule(parent), child, made)

    def prepare(self) -> Any:
        """Adapters, checkpointing, training mode."""
        from foretune.runtime.adapters import attach_adapters
        from foretune.runtime.checkpointing import enable_checkpointing

        model, facts = self.base, facts_of(self.config, shape_of(self.case))
        if self.config.lora is not None:
            prefix = facts.shape.layer_prefix
            names = [f"{prefix}{i}.{projection.name}" for projection in facts.adapted for i in projection.layers]
            model = attach_adapters(self.base, self.config.lora, names)
        if self.config.gradient_checkpointing:
            enable_checkpointing(self.base)
        model.train()
        return model

    def train(self) -> None:
        """Run the updates by the runtime's own loop."""
        from foretune.runtime.optimizer import make_optimizer
        from foretune.runtime.update import run_update

        settings, steps = self.config.optimizer, self.config.batch.accumulation_steps
        self.optimizer = make_optimizer(settings, self.trained)
        num_targets = steps * (ROWS * self.case.tokens - self.case.tokens // 4)
        for update in range(NUM_UPDATES):
            self.meter.suffix = "" if update == 0 else " (later)"
            run_update(self.step, self.batches(steps), num_targets, self.optimizer, settings, self.trained)

    def batches(self, steps: int) -> Iterator[tuple[Any, Any, None]]:
        """Make each microstep's batch when it is asked for; afterwards the optimizer's phase begins."""
        for _ in range(steps):
            self.meter.enter(f"forward{self.meter.suffix}")
            yield (*self.batch(), None)  # no positions: rows are not packed
        self.meter.enter(f"optimizer{self.meter.suffix}")

    def batch(self) -> tuple[Any, Any]:
        """Random tokens; the end of the first row is padding."""
        import torch

        from foretune.runtime.loss import IGNORED

        size, num_words = (ROWS, self.case.tokens), MODELS[self.case.model]["vocab_size"]
        ids_BS, targets_BS = (torch.randint(num_words, size) for _ in range(2))
        targets_BS[0, -(self.case.tokens // 4) :] = IGNORED
        return ids_BS.to(DEVICE), targets_BS.to(DEVICE)

    def enter_loss(self, *_: Any) -> None:
        """The loss begins where the head is called, unless backward recomputes it."""
        if not self.meter.in_backward:
            self.meter.enter(f"loss{self.meter.suffix}")


def filled(shape: Any, dtype: Any) -> Any:
    """A parameter's data: small numbers, so that the loss is finite; vectors are ones."""
    import torch

    data = torch.empty(shape, dtype=dtype, device=DEVICE)
    return data.fill_(1.0) if data.dim() == 1 else data.normal_(0.0, 0.02)


@contextmanager
def backward_noticed(meter: Meter) -> Iterator[None]:
    """Tell the meter when the engine runs."""
    from torch import Tensor

    original = Tensor.backward

    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        meter.enter(f"backward{meter.suffix}")
        meter.in_backward = True
        try:
            original(self, *args, **kwargs)
        finally:
            meter.in_backward = False

    with patch.object(Tensor, "backward", backward):
        yield


def measure(case: Case) -> dict[str, Any]:
    """Run a configuration from loading to the second update, and read everything off the allocator."""
    import torch

    bridged = bridge_versions()
    before = nvml(lambda ml, handle: ml.nvmlDeviceGetMemoryInfo(handle).used)
    torch.cuda.init()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_HISTORY)
    torch.manual_seed(0)
    meter, start = Meter(), time.monotonic()
    gc.collect()
    gc.disable()  # a death must come from a reference count
    with backward_noticed(meter), called_as(case):
        run = Run(case, meter)
        run.train()
    meter.end()
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    after = nvml(lambda ml, handle: ml.nvmlDeviceGetMemoryInfo(handle).used)
    now_free = torch.cuda.mem_get_info()[0]
    reserved = torch.cuda.memory_reserved()
    return {
        "bridged": bridged,
        "seconds": round(seconds, 2),
        "phases": list(meter.ended),
        "emptied_at": meter.emptied_at,
        "reserved_end_bytes": reserved,
        "device_used_bytes": {"first": total - free, "last": total - now_free, "total": total},
        "nvml_used_bytes": {"first": before, "last": after, "processes": process_bytes()},
        "context_bytes": total - now_free - reserved,
        **history(),
        "attention": attention_kernels(run),
    }


def history() -> dict[str, Any]:
    """Read torch's memory history: three columns, and where each allocation was made."""
    import torch

    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    entries = snapshot["device_traces"][torch.cuda.current_device()]
    stacks: dict[str, int] = {}
    stack_of = []
    for entry in entries:
        if entry["action"] == "alloc":
            stack_of.append(stacks.setdefault(innermost(entry.get("frames") or []), len(stacks)))
    return {
        "actions": packed(ord(ACTIONS.get(entry["action"], "?")) for entry in entries),
        "sizes": packed(entry.get("size", 0) for entry in entries),
        "addresses": packed(entry.get("addr", 0) for entry in entries),
        "stacks": packed_text(list(stacks)),
        "stack_of": packed(stack_of),
    }


def innermost(frames: list[dict[str, Any]]) -> str:
    """The three innermost frames outside torch's plumbing, without the machine's folders."""
    plumbing = ("torch/_ops", "torch/nn/modules/module.py", "torch/utils/_", "torch/_tensor.py", "/unittest/")
    kept = []
    for frame in frames:
        name = frame["filename"].replace("\\", "/")
        if not any(part in name for part in plumbing):
            short = name.rpartition("-packages/")[2].rpartition("/src/")[2].rpartition("/benchmarks/")[2]
            kept.append(f"{short}:{frame['line']} {frame['name']}")
    return " < ".join(kept[:3]) or "no Python frame (the engine's thread)"


def attention_kernels(run: Run) -> list[str]:
    """Ask torch which kernel it chooses, in one more forward after everything was read."""
    import torch
    import torch.nn.functional as F

    if run.config.attention != "sdpa":
        return [run.config.attention]
    run.meter.in_backward = True  # its phases are over
    found: dict[str, None] = {}
    original = F.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        chosen = torch._fused_sdp_choice(query, key, value, attn_mask, *args, **kwargs)
        shapes = f"q {list(query.shape)} k {list(key.shape)} {query.dtype}".replace("torch.", "")
        mask = "no mask" if attn_mask is None else f"mask {list(attn_mask.shape)} {attn_mask.dtype}"
        name = torch.nn.attention.SDPBackend(chosen).name
        found[f"{name.lower()}: {shapes}, {mask}, {sorted(kwargs.items())}".replace("torch.", "")] = None
        return original(query, key, value, attn_mask, *args, **kwargs)

    try:
        with patch.object(F, "scaled_dot_product_attention", attention), called_as(run.case):
            run.step(*run.batch())
    except Exception as error:  # only an explanation is lost
        found[f"not known: {type(error).__name__}: {error}"[:300]] = None
    return list(found)


# -- the command line
def trace_all(names: list[str], device: dict[str, Any], out: Path) -> None:
    """Trace one after the other; each is written when it is there, also what failed."""
    with out.open("a") as stream:
        for case in [case for case in CASES if case.name in names]:
            try:
                made = trace(case, device)
            except Exception:
                made = {"error": traceback.format_exc()[-4000:]}
            stream.write(json.dumps({"name": case.name, **made}) + "\n")
            stream.flush()


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("probe", "trace", "measure"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", type=json.loads)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if asked.verb == "trace":
        trace_all(asked.names, asked.device, asked.out)
        return
    case = next((case for case in CASES if case.name in asked.names), None)
    try:
        made = probe() if case is None else measure(case)
    except Exception:
        traceback.print_exc()
        if asked.verb == "probe":
            sys.exit(1)
        made = {"error": traceback.format_exc()[-4000:]}
    asked.out.write_text(json.dumps(made))


if __name__ == "__main__":
    main()
