"""The trace: the real program without data, held against the estimate's program."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from memory.runs import SMALL, all_layers, canonical, shape_of
from runtime.random_runs import random_run
from transformers import AutoConfig

from foretune.contract import TrainingConfig
from foretune.errors import ConfigError, UnsupportedError
from foretune.memory import estimate_memory
from foretune.runtime.load import model_config
from foretune.runtime.step import TrainingStep
from foretune.runtime.trace import Trace, trace_memory
from foretune.runtime.trace.recorder import Recorder

IN_CI = range(60)
LATER = range(60, 300)


def events_of(trace: Trace) -> list[list[int]]:
    """The trace's events with births numbered in order."""
    names: dict[int, int] = {}
    out = []
    for slot, size in trace.program.events:
        if size < 0:
            continue
        if size > 0:
            names[slot] = len(names)
        out.append([names[slot], trace.births[slot].num_bytes if size else -1])
    return out


def compare(seed: int, *, packing: bool = False) -> None:
    run = random_run(seed)
    run = run._replace(config=run.config.with_(batch=run.config.batch.with_(packing=packing)))
    shape = shape_of(run.model)
    trace = trace_memory(run.config, shape, run.model, run.device)
    estimate = estimate_memory(run.config, shape, run.device)
    assert canonical(all_layers(run.config, shape, run.device)[0]) == events_of(trace)
    assert estimate.allocated_bytes == trace.estimate.allocated_bytes
    assert estimate.reserved_bytes == trace.estimate.reserved_bytes
    assert estimate.requested_bytes == trace.estimate.requested_bytes
    assert estimate.attention_kernel == trace.estimate.attention_kernel


@pytest.mark.parametrize("seed", IN_CI)
def test_the_estimate_has_the_events_of_the_traced_program(seed: int) -> None:
    compare(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", LATER)
def test_the_estimate_has_the_events_of_the_traced_program_on_many_more(seed: int) -> None:
    compare(seed)


@pytest.mark.parametrize("seed", range(0, 60, 4))
def test_packed_rows_have_the_events_of_the_traced_program(seed: int) -> None:
    compare(seed, packing=True)


@pytest.mark.full
@pytest.mark.parametrize("seed", LATER)
def test_packed_rows_have_the_events_of_the_traced_program_on_many_more(seed: int) -> None:
    compare(seed, packing=True)


@pytest.mark.parametrize("seed", [0, 2, 4, 7, 11, 13, 20, 23])
def test_evaluation_and_save_are_phases_of_both(seed: int) -> None:
    run = random_run(seed)
    config = run.config.with_(evaluation=run.config.evaluation.with_(split=0.1))
    shape = shape_of(run.model)
    traced, estimated = trace_memory(config, shape, run.model, run.device), estimate_memory(config, shape, run.device)
    assert canonical(all_layers(config, shape, run.device)[0]) == events_of(traced)
    assert estimated.phases == traced.estimate.phases
    *_, evaluation, save = estimated.phases
    assert (evaluation.phase, save.phase) == ("evaluation", "save")
    without = estimate_memory(run.config, shape, run.device).phases
    assert [phase.phase for phase in without][-2:] == ["optimizer (later)", "save"]
    assert evaluation.allocated_bytes > save.allocated_bytes == without[-1].allocated_bytes


def config(**changes: Any) -> TrainingConfig:
    batch = {"micro_batch_size": 2, "sequence_length": 128}
    fields: dict[str, Any] = {"model": {"id": "test/model"}, "precision": {"dtype": "bf16"}, "batch": batch, "lora": {}}
    return TrainingConfig.create(**{**fields, **changes})


def test_a_fused_loss_has_a_chunk_of_logits_and_refuses_what_it_cannot_compute() -> None:
    peaks = {loss: trace_memory(config(loss=loss), shape_of(SMALL), SMALL) for loss in ("stock", "liger")}
    tokens, vocabulary = 2 * 128, SMALL["vocab_size"]
    liger = [b for b in peaks["liger"].births if vocabulary in b.shape and b.phase.startswith("loss")]
    assert [birth.shape for birth in liger] == [(16, vocabulary)] * 2  # ceil(8000 / 512) = 16 pieces, in two updates
    stock = [b for b in peaks["stock"].births if vocabulary in b.shape and b.phase.startswith("loss")]
    assert (tokens, vocabulary) in {birth.shape for birth in stock}
    assert peaks["liger"].estimate.allocated_bytes < peaks["stock"].estimate.allocated_bytes
    capped = {**SMALL, "model_type": "gemma2", "head_dim": 64, "final_logit_softcapping": 30.0}
    with pytest.raises(UnsupportedError, match="changes its logits"):
        trace_memory(config(loss="liger", attention="eager"), shape_of(capped), capped)


def test_an_8_bit_weight_is_a_byte_and_is_widened_for_its_inputs_gradient() -> None:
    trace = trace_memory(config(quantization={"scheme": "int8"}), shape_of(SMALL), SMALL)
    width, inner, layers = SMALL["hidden_size"], SMALL["intermediate_size"], SMALL["num_hidden_layers"]

    def made(dtype: str, phase: str) -> int:
        return sum(b.dtype == dtype and b.phase == phase and b.shape == (inner, width) for b in trace.births)

    assert made("int8", "load") == 2 * layers  # gate and up
    assert made("bfloat16", "backward") == 2 * layers
    codes = [b for b in trace.births if b.dtype == "int8" and b.phase == "load"]
    assert sum(birth.num_bytes for birth in codes) == trace.estimate.quantized_params


def test_a_trace_is_an_answer_of_its_own_kind_whose_components_add_up() -> None:
    trace = trace_memory(config(), shape_of(SMALL), SMALL)
    answer = trace.estimate
    assert answer.kind == "traced"
    assert sum(part.num_bytes for part in answer.components) == answer.allocated_bytes
    assert {phase.phase for phase in answer.phases} >= {"load", "prepare", "forward", "loss", "backward", "optimizer"}


def test_one_retained_tensor_in_the_step_moves_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    original, kept = TrainingStep.forward, []

    def forward(self: TrainingStep, *batch: torch.Tensor | None) -> torch.Tensor:
        kept.append(torch.empty(3 << 20, dtype=torch.uint8, device="meta"))
        return original(self, *batch)

    before = trace_memory(config(), shape_of(SMALL), SMALL)
    monkeypatch.setattr(TrainingStep, "forward", forward)
    after = trace_memory(config(), shape_of(SMALL), SMALL)
    assert after.estimate.allocated_bytes >= before.estimate.allocated_bytes + (3 << 20)
    assert events_of(after) != canonical(all_layers(config(), shape_of(SMALL))[0])


def patched() -> tuple[Any, ...]:
    import torch.optim.optimizer as optim
    import torch.utils._foreach_utils as foreach

    return (
        F.scaled_dot_product_attention,
        F.dropout,
        F.softmax,
        torch.Tensor.backward,
        optim._get_fused_kernels_supported_devices,
        foreach._get_foreach_kernels_supported_devices,
    )


def test_no_patch_outlives_a_trace_after_an_exception_too(monkeypatch: pytest.MonkeyPatch) -> None:
    before = patched()
    trace_memory(config(), shape_of(SMALL), SMALL)
    assert patched() == before
    monkeypatch.setattr(TrainingStep, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trace_memory(config(), shape_of(SMALL), SMALL)
    assert patched() == before


def test_a_program_that_never_ends_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretune.runtime.trace.recorder.MAX_EVENTS", 500)
    with pytest.raises(UnsupportedError, match="500 events"):
        trace_memory(config(), shape_of(SMALL), SMALL)


@pytest.mark.parametrize("key", ["_attn_implementation_internal", "trust_remote_code", "_attn_implementation"])
def test_config_keys_that_swap_internals_are_refused_before_anything_is_built(key: str) -> None:
    with pytest.raises(UnsupportedError, match=key):
        trace_memory(config(), shape_of(SMALL), {**SMALL, key: "eager"})


@pytest.mark.parametrize("key", ["_attn_implementation_internal", "auto_map", "trust_remote_code"])
def test_so_they_are_inside_a_part(key: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"vision_config\.{key}"):
        model_config({**SMALL, "vision_config": {key: "x"}}, attention="sdpa")


def test_what_transformers_notes_about_itself_is_left_out() -> None:
    noted = {"_name_or_path": "a/b", "_commit_hash": None, "_sliding_window_pattern": 6}
    ours = {"attn_implementation": "somebody/kernel", "experts_implementation": "somebody/kernel"}
    made = model_config({**SMALL, **noted, **ours}, attention="sdpa")
    assert (made.name_or_path, made._attn_implementation) == ("", "sdpa")
    assert "somebody" not in str(made.to_dict())


def test_what_transformers_itself_writes_into_a_config_is_taken() -> None:
    """Keys of Gemma 3 and OPT that begin as internals do, and infinity, which JSON does not have."""
    opt = AutoConfig.for_model("opt", num_hidden_layers=1, _remove_final_layer_norm=True)
    gemma = AutoConfig.for_model("gemma3_text", num_hidden_layers=12)
    written = [json.loads(each.to_json_string(use_diff=False)) for each in (opt, gemma)]
    assert {"_remove_final_layer_norm", "_sliding_window_pattern"} <= {*written[0], *written[1]}
    assert model_config(written[0], attention="eager")._remove_final_layer_norm is True
    assert model_config(written[1], attention="eager").layer_types == gemma.layer_types
    falcon = json.loads(AutoConfig.for_model("falcon_h1", num_hidden_layers=1).to_json_string(use_diff=False))
    assert falcon["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert tuple(model_config(falcon, attention="eager").time_step_limit) == (0.0, float("inf"))


def test_what_transformers_refuses_is_one_error() -> None:
    with pytest.raises(ConfigError, match="Transformers refuses"):
        trace_memory(config(), shape_of(SMALL), {**SMALL, "num_attention_heads": 7})


def test_the_recorder_names_what_is_alive() -> None:
    trace = trace_memory(config(), shape_of(SMALL), SMALL)
    names = {birth.name for birth in trace.births}
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert any("workspace" in name for name in names)
    json.dumps([birth._asdict() for birth in trace.births[:10]])


def test_a_packed_batch_has_a_mask_for_every_row_and_an_unpacked_one_has_none() -> None:
    batch = {"micro_batch_size": 2, "sequence_length": 128}
    traces = {
        packing: trace_memory(config(batch={**batch, "packing": packing}), shape_of(SMALL), SMALL)
        for packing in (False, True)
    }
    tables = {p: [b for b in t.births if b.shape == (2, 1, 128, 128)] for p, t in traces.items()}
    assert tables[True]
    assert not tables[False]
    kernels = {p: t.estimate.attention_kernel for p, t in traces.items()}
    assert (kernels[False], kernels[True]) == ("sdpa: flash", "sdpa: memory-efficient")
    assert any("packed rows" in path for path in traces[True].estimate.untested_paths)
    assert not any("packed rows" in path for path in traces[False].estimate.untested_paths)


def test_reading_a_value_is_answered() -> None:
    recorder = Recorder(estimate_stack(), 10)
    with recorder:
        assert torch.ones(3, device="meta").sum().item() == 1.0
        assert bool(torch.ones(1, dtype=torch.bool, device="meta"))


def estimate_stack() -> Any:
    from foretune.memory import FORETUNE

    return FORETUNE
