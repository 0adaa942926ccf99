"""Other people's loops in the trace: held against the estimate's program, and against what each mechanism says."""

from typing import Any

import pytest
import torch
from memory.runs import shape_of
from runtime.random_runs import random_run

from foretune.contract import TrainingConfig
from foretune.errors import UnsupportedError
from foretune.memory import PROFILES, TRAINER, TRL, StackProfile, estimate_memory
from foretune.runtime.qualify import require_same_class
from foretune.runtime.trace import Trace, trace_memory
from foretune.runtime.trace.rotary import angles_by_product

LOOPS = ("manual-loop", "manual-loop-5.0", "manual-loop-windows")
FMS = PROFILES["fms-4.48"]
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
ROWS, TOKENS = 2, 1024
LOGITS = ROWS * TOKENS * MODEL["vocab_size"]
"""Elements."""
SHIFTED = ROWS * (TOKENS - 1) * MODEL["vocab_size"]
CHECKPOINT = ROWS * TOKENS * MODEL["hidden_size"]


def compare(seed: int, stack: StackProfile) -> None:
    run = random_run(seed)
    config, shape = run.config.with_(loss="stock"), shape_of(run.model)
    traced = trace_memory(config, shape, run.model, run.device, stack=stack).estimate
    estimated = estimate_memory(config, shape, run.device, stack=stack)
    assert estimated.allocated_bytes == traced.allocated_bytes
    assert estimated.reserved_bytes == pytest.approx(traced.reserved_bytes, rel=0.003)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("seed", range(5))
def test_the_estimate_of_a_plain_loop_is_its_trace(seed: int, name: str) -> None:
    compare(seed, PROFILES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("seed", range(5, 25))
def test_the_estimate_of_a_plain_loop_is_its_trace_on_many_more(seed: int, name: str) -> None:
    compare(seed, PROFILES[name])


def config(**changes: Any) -> TrainingConfig:
    fields: dict[str, Any] = {
        "model": {"id": "test/model"},
        "precision": {"dtype": "bf16"},
        "attention": "flash_attention_2",
        "batch": {"micro_batch_size": ROWS, "sequence_length": TOKENS},
        "lora": {"rank": 8, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"], "dropout": 0.1},
    }
    return TrainingConfig.create(**{**fields, **changes})


def traced(stack: StackProfile, **changes: Any) -> Trace:
    return trace_memory(config(**changes), shape_of(MODEL), MODEL, stack=stack)


def births(trace: Trace, phase: str, num_bytes: int) -> int:
    """Count what a phase made of a size."""
    return sum(birth.phase == phase and birth.num_bytes == num_bytes for birth in trace.births)


def test_the_loss_of_each_transformers_copies_the_logits_as_it_does() -> None:
    new, old = traced(FMS), traced(PROFILES["fms-4.45"])
    # 4.46 to 4.48: bf16 logits stay with the caller; fp32, shifted and log-softmax beside them
    assert births(new, "loss", 2 * LOGITS) == births(old, "loss", 2 * LOGITS) == 1
    peaks = [next(p.allocated_bytes for p in t.estimate.phases if p.phase == "loss") for t in (new, old)]
    # up to 4.45 they die when the model makes them fp32
    assert peaks[0] - peaks[1] == pytest.approx(2 * LOGITS, abs=1 << 20)  # a block may have 1 MiB of slack


def test_triton_writes_over_the_logits_and_liger_never_has_them() -> None:
    triton = traced(FMS.with_(loss_kernel="triton"))
    assert births(triton, "loss", 4 * SHIFTED) == 1
    assert births(triton, "backward", 4 * SHIFTED) == 0
    assert births(traced(FMS), "loss", 4 * SHIFTED) == 2
    liger = traced(FMS.with_(loss_kernel="liger"))
    assert max(birth.num_bytes for birth in liger.births if "loss" in birth.phase) < 2 * LOGITS / 4
    assert liger.estimate.allocated_bytes < triton.estimate.allocated_bytes < traced(FMS).estimate.allocated_bytes


def test_checkpoints_are_fp32_where_a_quantized_layer_returns_its_inputs_dtype() -> None:
    """TRL upcasts the norms, so that the stream is fp32 from the first MLP on (MEMORY: worth 29 % there)."""
    quantized = {"quantization": {"double_quant": True, "compute_dtype": "bf16"}}
    plain = traced(FMS.with_(autocast="bf16"), **quantized)
    norms = traced(FMS.with_(autocast="bf16", kbit_upcast="norms"), **quantized)

    def streams(trace: Trace, dtype: str) -> int:
        shape = (ROWS, TOKENS, MODEL["hidden_size"])
        sums = [b for b in trace.births if b.phase == "forward" and b.name == "aten.add.Tensor" and b.shape == shape]
        return sum(birth.dtype == dtype for birth in sums)

    assert streams(plain, "float32") == 0
    assert streams(norms, "float32") >= 2 * MODEL["num_hidden_layers"] - 1


def test_accelerate_hands_fp32_logits_on() -> None:
    kept = traced(FMS.with_(autocast="bf16", converts_outputs=True))
    assert births(kept, "loss", 4 * LOGITS) == births(traced(FMS.with_(autocast="bf16")), "loss", 4 * LOGITS) + 1


def test_fused_kernels_leave_out_what_they_do_in_place() -> None:
    quantized = {"quantization": {"double_quant": True, "compute_dtype": "bf16"}}
    base = FMS.with_(autocast="bf16")
    traces = [traced(base.with_(fused=fused), **quantized) for fused in ((), ("rmsnorm",), ("rmsnorm", "rope"))]
    made = [len(trace.births) for trace in traces]
    assert made[0] > made[1] > made[2]
    # a fused norm keeps its input and a number a row, where the model's own makes fp32 copies of the input
    assert births(traces[0], "forward", 4 * CHECKPOINT) > births(traces[1], "forward", 4 * CHECKPOINT)
    fused = traced(base.with_(fused=("lora",)), **quantized)
    assert fused.estimate.trainable_params == traces[0].estimate.trainable_params
    # fused adapters act on a quantized base alone
    assert traced(base.with_(fused=("lora",))).estimate.allocated_bytes == traced(base).estimate.allocated_bytes


def test_the_reentrant_form_keeps_the_same_checkpoints() -> None:
    forms = [traced(FMS.with_(checkpoint_form=form)) for form in ("reentrant", "non-reentrant")]
    kept = [births(trace, "forward", 2 * CHECKPOINT) for trace in forms]
    assert kept[0] == kept[1]
    assert forms[0].program.events != forms[1].program.events


def test_an_older_class_of_another_structure_is_refused_by_name() -> None:
    mixtral = {**MODEL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(UnsupportedError, match=r"layers of\s+their own"):
        require_same_class(shape_of(mixtral), FMS)
    require_same_class(shape_of(mixtral), PROFILES["manual-loop"])
    require_same_class(shape_of(MODEL), FMS)


def test_rotary_angles_by_product_are_the_same_numbers() -> None:
    frequencies = torch.rand(4)

    def forward(position_ids: torch.Tensor) -> torch.Tensor:
        return position_ids[..., None].float() * frequencies

    positions = torch.arange(7)[None].expand(2, -1)
    assert torch.allclose(angles_by_product(forward)(positions), forward(positions))


# -- Trainer and TRL
IN_BF16: dict[str, Any] = {"autocast": "none", "converts_outputs": False}
SDPA: dict[str, Any] = {"attention": "sdpa"}
FULL: dict[str, Any] = {**SDPA, "lora": None}
QUANTIZED: dict[str, Any] = {**SDPA, "quantization": {"double_quant": True, "compute_dtype": "bf16"}}
PLAIN = TRAINER.with_(**IN_BF16)
BATCH = 8 * ROWS * TOKENS
TILE = 2 * ROWS * (TOKENS - 1) * 32768


def accumulating(steps: int) -> dict[str, Any]:
    return {**SDPA, "batch": {"micro_batch_size": ROWS, "sequence_length": TOKENS, "accumulation_steps": steps}}


def test_trainer_has_all_batches_of_an_update_before_its_first_forward() -> None:
    few, many = (traced(PLAIN, **accumulating(steps)) for steps in (5, 105))
    first = next(place for place, birth in enumerate(many.births) if birth.name == "aten.embedding.default")
    before = [birth for birth in many.births[:first] if birth.num_bytes == BATCH and birth.phase == "forward"]
    assert len(before) >= 3 * 105
    # two updates' batches are there at once when the second is collected, one update's at the peak
    assert many.estimate.allocated_bytes - few.estimate.allocated_bytes == 100 * 3 * BATCH


def test_trainers_loss_is_a_sum_divided_by_the_count_of_targets() -> None:
    assert births(traced(PLAIN, **SDPA), "forward", ROWS * (TOKENS - 1)) == 1  # labels[..., 1:] != -100
    assert births(traced(PLAIN.with_(collects_batches=False), **SDPA), "forward", ROWS * (TOKENS - 1)) == 0


def test_trainers_optimizer_makes_the_states_of_norms_last() -> None:
    norm, matrix = (MODEL["hidden_size"],), (MODEL["hidden_size"], MODEL["hidden_size"])

    def states(stack: StackProfile) -> list[tuple[int, ...]]:
        trace = traced(stack, **FULL)
        return [b.shape for b in trace.births if b.phase == "optimizer" and b.shape in (norm, matrix)]

    grouped, in_order = states(PLAIN), states(PLAIN.with_(splits_decay=False))
    assert sorted(grouped) == sorted(in_order)
    assert grouped == sorted(in_order, key=len, reverse=True) != in_order


def test_trainer_keeps_the_embeddings_states_in_32_bit() -> None:
    embeddings = MODEL["vocab_size"] * MODEL["hidden_size"]
    for wide, sizes in ((True, (4, 1)), (False, (1, 1))):
        trace = traced(PLAIN.with_(embeddings_in_32bit=wide), **FULL, optimizer={"name": "adamw_8bit"})
        states = [b.num_bytes for b in trace.births if b.phase == "optimizer" and b.num_bytes % embeddings == 0]
        assert states == [size * embeddings for size in sizes for _ in range(2)]


def test_trl_casts_the_adapters_of_a_quantized_base() -> None:
    wide, cast = (traced(TRL.with_(casts_adapters=casts), **QUANTIZED) for casts in (False, True))

    def states(trace: Trace) -> int:
        return next(part.num_bytes for part in trace.estimate.components if part.name == "optimizer states")

    assert states(wide) > 1.9 * states(cast)
    same = (traced(TRL.with_(casts_adapters=casts), **SDPA).program.events for casts in (False, True))
    assert next(same) == next(same)


def test_trl_makes_logits_in_tiles_forward_and_backward() -> None:
    trace = traced(TRL, **SDPA)
    assert births(trace, "loss", TILE) == births(trace, "backward", TILE) == 1
    assert max(birth.num_bytes for birth in trace.births if birth.phase == "loss") == TILE
    assert trace.estimate.allocated_bytes < traced(TRAINER, **SDPA).estimate.allocated_bytes - 2 * 4 * LOGITS


def test_trls_tiles_are_made_fp32_where_triton_is_missing() -> None:
    with_triton, without = (traced(TRL.with_(has_triton=has), **SDPA) for has in (True, False))
    assert births(with_triton, "loss", 4 * SHIFTED) == 0
    assert births(without, "loss", 4 * SHIFTED) > 1


def test_trl_adds_the_routers_loss_where_the_config_has_a_weight_for_it() -> None:
    routed = {**MODEL, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64}
    routed |= {"moe_intermediate_size": 128, "decoder_sparse_step": 1}
    for weight, times in ((0.001, MODEL["num_hidden_layers"]), (0.0, 0)):
        model = {**routed, "router_aux_loss_coef": weight}
        fields = {**SDPA, "lora": {"rank": 8, "targets": ["q_proj"]}}
        trace = trace_memory(config(**fields), shape_of(model), model, stack=TRL)
        weighted = [b for b in trace.births if b.phase == "loss" and b.shape == (ROWS * TOKENS, 8)]
        assert sum(birth.name == "aten.mul.Tensor" for birth in weighted) == times


def test_trl_reads_weights_onto_the_device() -> None:
    read, moved = (traced(TRL.with_(loads_onto_device=direct), **SDPA) for direct in (True, False))
    weights = sum(birth.num_bytes for birth in moved.births if birth.phase == "load" and birth.dtype == "bfloat16")
    assert read.births[0].name == "loader's warm-up"
    assert read.births[0].num_bytes == pytest.approx(weights, rel=1e-4)
    assert read.births[0].name != moved.births[0].name


def test_what_other_loops_do_in_evaluation_is_left_out_in_words() -> None:
    answer = trace_memory(config(evaluation={"split": 0.1}), shape_of(MODEL), MODEL, stack=FMS).estimate
    assert any("Evaluation is left out" in text for text in answer.assumptions)
    assert not any("Evaluation" in text for text in traced(FMS).estimate.assumptions)
