"""The answer for `device: cpu`: tensors against torch's own profiler, growth against real processes, and its words."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runtime.test_cpu_truth import CHUNKED, EAGER, KEPT, LORA, SGD, Case, measure, shape_of

from foretune.api import DeviceSpec, TraceAnswer, find_device, find_stack, trace
from foretune.errors import ConfigError, UnsupportedError
from foretune.memory.host import FIRST_USE_BYTES, assess_host_fit

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
CPU: dict[str, Any] = {"device": "cpu"}
FIRST = Case("llama", 2, 64, 1, {**CPU, "lora": LORA})
CASES = [
    FIRST,
    Case("llama", 1, 100, 2, {**CPU, **SGD, **KEPT}),
    Case("qwen3", 2, 96, 1, {**CPU, **CHUNKED}),
    pytest.param(Case("llama", 2, 64, 1, {**CPU, **EAGER, **KEPT, "lora": LORA}), marks=pytest.mark.full),
]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}


def answer_of(case: Case, **more: Any) -> TraceAnswer:
    return trace(case.config, shape=shape_of(case), raw_config={**case.raw_config, **more}).answer


@pytest.fixture(scope="module")
def answer() -> TraceAnswer:
    return answer_of(FIRST)


@pytest.fixture
def model(tmp_path: Path) -> tuple[str, ...]:
    Path(tmp_path, "config.json").write_text(json.dumps(LLAMA))
    words = ("--model", str(tmp_path), "--offline", "--dtype", "fp32", "--set", "device=cpu", "--seq-len", "64")
    return ("trace", *words, "--rank", "8")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tensors_at_the_peak_are_the_profilers_within_one_percent(case: Case) -> None:
    estimate, measured = answer_of(case).estimate, measure(case)
    assert abs(estimate.allocated_bytes - measured.peak_bytes) <= 0.01 * measured.peak_bytes
    interval = estimate.allocated_interval
    assert interval.low_bytes <= measured.peak_bytes <= interval.high_bytes


def test_components_and_what_is_alive_are_the_peak_to_the_byte(answer: TraceAnswer) -> None:
    estimate = answer.estimate
    assert sum(part.num_bytes for part in estimate.components) == estimate.allocated_bytes
    assert sum(group.num_bytes for group in answer.alive) == estimate.allocated_bytes
    assert "allocator slack" not in {part.name for part in estimate.components}


def test_no_field_has_a_gpus_figure(answer: TraceAnswer) -> None:
    estimate = answer.estimate
    assert (estimate.context.low_bytes, estimate.context.high_bytes) == (0, 0)
    assert estimate.process_bytes == estimate.reserved_bytes
    assert estimate.process_interval == estimate.reserved_interval
    assert estimate.need_bytes == estimate.process_interval.high_bytes
    assert estimate.allocated_bytes == estimate.requested_bytes
    texts = json.dumps(estimate.to_dict()).lower()
    assert not [word for word in ("cuda", "cublas", "card", "compute capability") if word in texts]


def test_phases_end_in_the_peaks_and_growth_never_falls_below_tensors(answer: TraceAnswer) -> None:
    estimate, phases = answer.estimate, answer.estimate.phases
    assert max(phase.allocated_bytes for phase in phases) == estimate.allocated_bytes
    assert max(phase.reserved_bytes for phase in phases) == estimate.reserved_bytes
    assert {phase.phase: phase.allocated_bytes for phase in phases}[estimate.peak_phase] == estimate.allocated_bytes
    assert all(phase.reserved_bytes > phase.allocated_bytes for phase in phases)


def test_a_checkpoint_in_16_bits_is_mapped_beside_its_conversion() -> None:
    in_fp32, in_bf16 = (answer_of(FIRST, dtype=dtype).estimate for dtype in ("float32", "bfloat16"))
    weights = next(part.num_bytes for part in in_fp32.components if part.name == "weights")
    assert in_fp32.host.ram_load_bytes == pytest.approx(FIRST_USE_BYTES + weights, rel=0.01)
    assert in_bf16.host.ram_load_bytes - in_fp32.host.ram_load_bytes == pytest.approx(weights / 2, rel=0.01)


def test_verdict_holds_the_interval_against_the_hosts_memory(answer: TraceAnswer) -> None:
    estimate = answer.estimate
    sure, least = estimate.need_bytes, estimate.process_interval.low_bytes
    for free, verdict in ((sure, "fits"), (sure - 1, "tight"), (least, "tight"), (least - 1, "does not fit")):
        host = DeviceSpec(name="host", total_bytes=8 * GIB, total_is="reported", free_bytes=free)
        assert assess_host_fit(estimate, host).verdict == verdict


def test_beyond_what_was_run_the_interval_is_twice_as_wide() -> None:
    short, long = (answer_of(Case("llama", rows, 64, 1, {**CPU, "lora": LORA})).estimate for rows in (16, 17))
    for estimate, percent in ((short, 15), (long, 30)):
        assert estimate.safety_margin_bytes == pytest.approx(estimate.reserved_bytes * percent / 100, abs=1)


def test_a_card_is_refused() -> None:
    with pytest.raises(ConfigError, match="host's memory"):
        trace(FIRST.config, device=find_device("rtx 3090"), shape=shape_of(FIRST), raw_config={})


def test_other_loops_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError) as caught:
        trace(FIRST.config, stack=find_stack("trainer"), shape=shape_of(FIRST), raw_config={})
    assert {problem.field for problem in caught.value.problems} == {"device"}


def test_the_estimate_points_at_the_trace(call, model: tuple[str, ...]) -> None:
    called = call("estimate", *model[1:])
    assert called.code == 2
    assert "foretune trace" in called.err


def test_the_text_is_about_the_hosts_memory(call, model: tuple[str, ...]) -> None:
    called = call(*model, "--explain", "--why")
    assert called.code == 0
    assert "of host memory" in called.out
    assert "Must be free on the host" in called.out
    words = called.out.lower()
    assert not [word for word in ("cuda context", "reserved", " card", "allocator") if word in words]


def test_detect_takes_this_machines_memory(call, model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from foretune import devices

    host = DeviceSpec(name="this machine's memory", total_bytes=8 * GIB, total_is="reported", free_bytes=4 * GIB)
    monkeypatch.setattr(devices, "host_memory", lambda: host, raising=False)
    fit = call(*model, "--detect", "--check", "--json").document["fit"]
    assert (fit["verdict"], fit["budget_bytes"]) == ("fits", 4 * GIB)
    assert call(*model, "--detect", "--free", "0.01", "--check", "--json").code == 3


@pytest.mark.parametrize("words", [("--gpu", "T4"), ("--vram", "16"), ("--free", "8")])
def test_flags_about_cards_are_refused_by_name(call, model: tuple[str, ...], words: tuple[str, ...]) -> None:
    called = call(*model, *words)
    assert called.code == 2
    assert words[0] in called.err


def test_the_plot_speaks_of_tensors_and_process(call, model: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "step.svg"
    assert call(*model, "--plot", str(file)).code == 0
    text = file.read_text()
    assert "process, peak of each phase" in text
    assert "reserved" not in text


def grown(*words: str) -> dict[str, Any]:
    """Run one row in a process of its own (benchmarks/cpu_growth.py)."""
    command = [sys.executable, str(ROOT / "benchmarks" / "cpu_growth.py"), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=dict(os.environ))
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_a_process_grows_by_what_is_traced(tmp_path: Path) -> None:
    row = grown("--small", "--only", "lora 2x256", "--cache", str(tmp_path), "--updates", "2")
    assert abs(row["measured_is_percent_off"]) <= 15


@pytest.mark.full
@pytest.mark.parametrize("name", ["lora 1x128", "lora 2x256", "lora 1x512 kept", "full 1x128", "full 2x256"])
@pytest.mark.parametrize("words", [(), ("--bf16",)], ids=["fp32", "bf16"])
def test_a_process_of_135m_parameters_grows_by_what_is_traced(
    name: str, words: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.getbasetemp() / "cpu-growth"
    row = grown("--only", name, "--cache", str(cache), *words)
    assert abs(row["measured_is_percent_off"]) <= 15
    assert row["tensor_bytes"] < row["measured_bytes"]
