"""A tiny fine-tune that is alive, made by the functions of a run: loaded, assembled, updated, without rows or folders.

The configuration is made past the contract's rules, so that bf16 and bitsandbytes run on a CPU.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from runs.made_run import SIZES, model_folder
from transformers import AutoConfig, AutoModelForCausalLM

from foretune.contract import (
    LoraSettings,
    ModelSource,
    OptimizerSettings,
    PrecisionSettings,
    QuantizationSettings,
    TrainingConfig,
)
from foretune.memory.figures import facts_of
from foretune.models import resolve_config, resolve_model
from foretune.runtime.border import quietly
from foretune.runtime.live import Live, assemble, fingerprints, make_live_optimizer
from foretune.runtime.load import load_model
from foretune.runtime.update import Batch, run_update

NF4 = QuantizationSettings.create()
BF16 = PrecisionSettings.create(dtype="bf16")
LORA = LoraSettings.create(rank=4, alpha=8.0)


_TEXT: dict[str, Any] = {**SIZES, "head_dim": 8, "eos_token_id": 2, "pad_token_id": 0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_TEXT, "tie_word_embeddings": True},
    "gemma2": _TEXT,
    "gemma3": {"text_config": _TEXT, "vision_config": _VISION, "mm_tokens_per_image": 4},
    "glm4_moe": {**_TEXT, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3_text": _TEXT,
    "hunyuan_v1_moe": {**_TEXT, "num_experts": 4},
    "ernie4_5_moe": {**_TEXT, **_EXPERTS, "moe_num_experts": 4},
    "opt": {**_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"vocab_size": 440, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gpt_oss": {**_TEXT, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Tiny models that have something of their own: tied embeddings, soft caps, a tower, routers kept or made in fp32,
weights that no gradient reaches, heads of which the backbone knows nothing, distances for positions, sinks."""


@functools.cache
def family_folder(model_type: str) -> Path:
    """Return a folder with a tiny random model, without a tokenizer; made once a process, to be read only."""
    folder = Path(tempfile.mkdtemp(prefix="foretune-test-family-"))
    torch.manual_seed(1)
    with quietly():
        config = AutoConfig.for_model(model_type, **FAMILIES[model_type])
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def made_config(folder: Path | None = None, **fields: Any) -> TrainingConfig:
    """Return a configuration of LoRA in fp32 on a CPU, with other fields in their places."""
    wanted: dict[str, Any] = {
        "model": ModelSource.create(id=str(folder or model_folder())),
        "device": "cpu",
        "precision": PrecisionSettings.create(dtype="fp32"),
        "lora": LORA,
        "optimizer": OptimizerSettings.create(learning_rate=0.01),
        **fields,
    }
    return TrainingConfig.create(**wanted)


@functools.cache
def shape_of(folder: str) -> Any:
    """Return the shape and the config.json of a folder's model."""
    return resolve_model(folder), resolve_config(folder)


def loaded(config: TrainingConfig) -> torch.nn.Module:
    """Load the base as a run does."""
    _, raw = shape_of(config.model.id)
    with quietly():
        return load_model(
            raw,
            Path(config.model.id),
            precision=config.precision,
            quantization=config.quantization,
            attention=config.attention,
            device=config.device,
        ).model


def alive(config: TrainingConfig, base: Any = None) -> Live:
    """Return what a run has before its first update."""
    base = loaded(config) if base is None else base
    with quietly():
        live = assemble(base, config, facts_of(config, shape_of(config.model.id)[0]), fingerprints(base))
        make_live_optimizer(live)
    return live


def batch(*, rows: int = 2, tokens: int = 8) -> Batch:
    """Return a micro batch, always the same."""
    ids_BS = torch.randint(3, 400, (rows, tokens), generator=torch.Generator().manual_seed(7))
    targets_BS = ids_BS.roll(-1, 1)
    targets_BS[:, -1] = -100
    return Batch(ids_BS, targets_BS)


def packed() -> Batch:
    """Return a row that holds two examples, one of five tokens and one of seven."""
    positions_BS = torch.cat([torch.arange(5), torch.arange(7)])[None]
    return batch(rows=1, tokens=12)._replace(position_ids_BS=positions_BS)


def update(live: Live, times: int = 1) -> list[float]:
    """Apply updates as a run does and count them; return the losses."""
    rows, losses = batch(), []
    for _ in range(times):
        trained = list(live.trained.values())
        with quietly():
            done = run_update(live.step, [rows], 14, live.optimizer, live.config.optimizer, trained, scaler=live.scaler)
        live.updates_applied += not done.was_skipped
        live.updates_here += 1
        losses += done.losses
    return losses
