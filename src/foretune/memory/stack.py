"""Stack profiles: what a set of library versions, a platform and a training loop allocate.

One table for the estimate and for the trace. A profile is keyed by versions, platform and driver, never by a source
of measurements. Every rule says where it is read off.
"""

from typing import Literal

from foretune.devices import DeviceSpec
from foretune.memory.tape import DeviceRules
from foretune.values import Value

RECENT_CUBLAS_BYTES = 32 << 20
"""aten/src/ATen/cuda/CublasHandlePool.cpp (parseChosenWorkspaceSize): compute capability 9, 10 and 12."""

__all__ = ["FMS_4_45", "FMS_4_48", "FORETUNE", "MANUAL_LOOP", "PROFILES", "StackProfile"]


class StackProfile(Value, frozen=True, kw_only=True):
    """What one stack does. The defaults are foretune's own runtime."""

    name: str
    torch: str = "2.13"
    transformers: str = "5.24"
    peft: str = "0.21"
    bitsandbytes: str = "0.50"
    platform: Literal["linux", "windows"] = "linux"
    # -- loading
    has_warmup_block: bool = False
    """Transformers' loader first allocates one block of the model's packed size (caching_allocator_warmup)."""
    load_order: Literal["module", "natural"] = "module"
    """Parameters in module order, or in natural order of their checkpoint names (Transformers' loader)."""
    copies_code_tables: bool = True
    """bitsandbytes 0.50 keeps a 64 B code table and, nested, a copy of the 1 KiB map with each weight."""
    kbit_upcast: Literal["none", "norms", "all"] = "none"
    """Which unquantized parameters become fp32 under quantization (prepare_model_for_kbit_training: all)."""
    empties_cache: bool = True
    """The cache is emptied after loading and preparing (PEFT from 0.20 does so after its upcast)."""
    # -- the step
    embeddings_want_grad: bool = False
    """enable_input_require_grads makes the embeddings' output a leaf that keeps its gradient."""
    keeps_cache: bool = False
    """Without checkpointing a DynamicCache is filled (use_cache is left on)."""
    passes_mask: bool = False
    """An attention mask of ones goes with every batch."""
    loss: Literal["own", "transformers", "transformers 4.48", "transformers 4.45"] = "own"
    """Whose cross-entropy: ours (shifted targets come with the batch) or the model's: of Transformers 5; of 4.46 to
    4.48, where logits are shifted, which copies them, and the loss makes them fp32; up to 4.45, where the model does.
    """
    loss_kernel: Literal["none", "triton", "liger"] = "none"
    """A kernel in the place of torch's cross-entropy: Triton's writes over full logits, Liger's never has them."""
    holds_outputs: Literal["no", "through the update", "into the next forward"] = "no"
    """How long the caller holds the model's outputs, and with them the logits."""
    keeps_batch: bool = False
    """One batch is made before the first step and used for all."""
    zeroes_grads_first: bool = False
    """zero_grad stands at the start of an update instead of its end."""
    scales_every_loss: bool = True
    """The loss is divided before backward even without accumulation."""
    has_gemm_4bit: bool = True
    """bitsandbytes 0.50 computes 4-bit products in one operator that dequantizes inside."""
    rotary_by_product: bool = False
    """Rotary angles are a matrix product (Transformers before 5.24), and so the first to need cuBLAS."""
    repeats_heads_for_sdpa: bool = False
    """The caller's attention repeats keys and values for grouped heads before torch's kernel."""
    autocast: Literal["none", "bf16", "fp16"] = "none"
    """What the caller's forward is autocast to."""
    losses_without_upcast: tuple[str, ...] = ()
    """Model types whose class computes its loss itself, on logits as they are (up to Transformers 4.48)."""
    caches_though_checkpointed: tuple[str, ...] = ()
    """Model types whose class does not switch its cache off for checkpointing (gpt_bigcode's up to 4.48)."""
    converts_outputs: bool = False
    """Accelerate's mixed precision hands the model's outputs on as fp32 copies."""
    checkpoint_form: Literal["non-reentrant", "reentrant"] = "non-reentrant"
    """torch's form of activation checkpointing."""
    # -- kernels
    has_flash_package: bool = False
    """flash-attn is there: no mask is made, and Transformers' wrapper casts fp32 inputs first."""
    flash_repeats_heads_of: tuple[str, ...] = ()
    """Model types whose flash class repeats keys and values for grouped heads (Mistral's up to Transformers 4.47)."""
    fused: tuple[Literal["rmsnorm", "rope", "lora"], ...] = ()
    """Fused kernels of fms-acceleration: norms and rotary embeddings in place, adapters with a quantized base."""
    cublas_bytes: int = 8_519_680
    """cuBLAS workspace of one handle, of which there are two; before compute capability 9.0 (`on` knows the others)."""
    cublaslt_bytes: int = 1 << 20
    """cublasLt workspace, as soon as a linear has a bias (CUDABlas.cpp); Windows builds have that path compiled out."""
    sums_in_place: bool = True
    """The engine adds gradients in place (torch/csrc/autograd/input_buffer.cpp)."""

    @property
    def description(self) -> str:
        """Name and versions in one line."""
        libraries = f"torch {self.torch}, transformers {self.transformers}, peft {self.peft}"
        return f"{self.name}: {libraries}, bitsandbytes {self.bitsandbytes}, {self.platform}"

    def on(self, device: DeviceSpec | None) -> "StackProfile":
        """Return the profile with what depends on the device: from compute capability 9.0 larger workspaces."""
        capability = None if device is None else device.compute_capability
        if capability is None or float(capability) < 9.0:
            return self
        return self.with_(cublas_bytes=RECENT_CUBLAS_BYTES)

    @property
    def unwritten(self) -> tuple[str, ...]:
        """Name what of this stack the estimate has no program for; the trace runs it."""
        found = []
        if self.autocast != "none":
            found.append(f"autocast to {self.autocast}")
        if self.checkpoint_form != "non-reentrant":
            found.append("reentrant checkpointing")
        if self.loss not in ("own", "transformers"):
            found.append(f"the loss of {self.loss}")
        if self.loss_kernel != "none":
            found.append(f"the loss kernel {self.loss_kernel}")
        if self.fused:
            found.append(f"fused kernels ({', '.join(self.fused)})")
        return tuple(found)

    def device_rules(self) -> DeviceRules:
        """Return the part of the profile that the tape's operations read."""
        return DeviceRules(
            cublas_bytes=self.cublas_bytes,
            cublaslt_bytes=self.cublaslt_bytes,
            sums_in_place=self.sums_in_place,
            rotary_by_product=self.rotary_by_product,
        )


FORETUNE = StackProfile(name="foretune")
"""The runtime of this package: its own loader, step and loop on the libraries it is tested with."""

MANUAL_LOOP = StackProfile(
    name="manual-loop",
    torch="2.14",
    transformers="5.17",
    peft="0.20",
    bitsandbytes="0.50",
    has_warmup_block=True,
    load_order="natural",
    kbit_upcast="all",
    empties_cache=True,
    embeddings_want_grad=True,
    loss="transformers",
    holds_outputs="through the update",
    keeps_batch=True,
    zeroes_grads_first=True,
    scales_every_loss=False,
    rotary_by_product=True,
    repeats_heads_for_sdpa=True,
)
"""A plain loop around Transformers and PEFT: from_pretrained, prepare_model_for_kbit_training, get_peft_model with
input gradients on, one batch, `model(input_ids=..., labels=...)`; keys and values are repeated before attention."""

MANUAL_LOOP_5_0 = MANUAL_LOOP.with_(
    name="manual-loop-5.0", torch="2.10", transformers="5.0", peft="0.19", empties_cache=False
)
"""The same on Transformers 5.0 and PEFT 0.19, which does not empty the cache. Its loader quantizes on four threads,
so under nf4 reserved varies from run to run; the order here is one of them."""

MANUAL_LOOP_WINDOWS = MANUAL_LOOP.with_(
    name="manual-loop-windows",
    torch="2.6",
    transformers="5.8",
    peft="0.19",
    bitsandbytes="0.49",
    platform="windows",
    copies_code_tables=False,
    empties_cache=False,
    keeps_cache=True,
    passes_mask=True,
    holds_outputs="into the next forward",
    keeps_batch=False,
    zeroes_grads_first=False,
    has_gemm_4bit=False,
    repeats_heads_for_sdpa=False,
    cublaslt_bytes=0,
)
"""A plain loop on Windows, whose wheels have no flash attention: a new batch with a mask of ones for each step, and
outputs that live into the next one; use_cache is left on."""

FMS_4_48 = StackProfile(
    name="fms-4.48",
    torch="2.4",
    transformers="4.48",
    peft="0.13",
    bitsandbytes="0.43",
    copies_code_tables=False,
    empties_cache=False,
    embeddings_want_grad=True,
    passes_mask=True,
    loss="transformers 4.48",
    has_gemm_4bit=False,
    rotary_by_product=True,
    losses_without_upcast=("bloom", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "opt"),
    caches_though_checkpointed=("gpt_bigcode",),
    checkpoint_form="reentrant",
    has_flash_package=True,
)
"""fms-hf-tuning: TRL 0.13's SFTTrainer on Transformers 4.48 and flash-attn, checkpointing reentrant. Which autocast and
which kernels run is the caller's choice (`with_`)."""

FMS_4_45 = FMS_4_48.with_(
    name="fms-4.45", transformers="4.45", loss="transformers 4.45", flash_repeats_heads_of=("mistral",)
)
"""The same on Transformers 4.45."""

PROFILES: dict[str, StackProfile] = {
    profile.name: profile
    for profile in (FORETUNE, MANUAL_LOOP, MANUAL_LOOP_5_0, MANUAL_LOOP_WINDOWS, FMS_4_48, FMS_4_45)
}
