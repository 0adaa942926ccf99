"""`foretune trace`: what it answers, writes, draws and refuses."""

import importlib.metadata
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretune.api import Traced, build_config, find_stack, resolve_config, resolve_model, trace
from foretune.cli.plot import draw_plot
from foretune.errors import MissingDependencyError, UnsupportedError
from foretune.memory.components import components_at
from foretune.memory.families import DECODERS
from foretune.runtime import libraries
from foretune.traces import timeline_of
from foretune.values import encode_json

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "_name_or_path": "somewhere/else",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}
MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
SHORT = ("--seq-len", "64", "--offline")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, config in (("llama", LLAMA), ("moe", MOE)):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(LLAMA))
    settings = {"model.id": str(file), "lora.rank": 4, "batch.sequence_length": 64, "batch.accumulation_steps": 2}
    return trace(build_config(settings).config)


def alike(call: Any, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The documents of both commands to the same question."""
    return tuple(call(command, *words, *SHORT, "--json").document for command in ("trace", "estimate"))  # type: ignore[return-value]


@pytest.mark.parametrize("words", [(), ("--method", "full", "--optimizer", "sgd"), ("--method", "qlora")])
def test_trace_answers_as_the_estimate_does(call, words: tuple[str, ...]) -> None:
    traced, estimated = alike(call, "--model", "llama", *words)
    assert (traced["kind"], estimated["kind"]) == ("traced", "estimated")
    assert traced["allocated_bytes"] == estimated["allocated_bytes"]
    assert traced["reserved_bytes"] == estimated["reserved_bytes"]
    assert set(estimated) - set(traced) == {"lengths"}
    own = {"alive", "num_events", "libraries", "remarks", "events_file"}
    assert set(traced) - set(estimated) == own


@pytest.fixture
def no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the layers of this family were not written."""
    monkeypatch.delitem(DECODERS, "qwen3_moe")


@pytest.mark.usefixtures("no_estimate")
def test_a_family_without_an_estimate_is_traced_and_the_refusal_says_so(call) -> None:
    refused = call("estimate", "--model", "moe", *SHORT)
    assert refused.code == 2
    assert "`foretune trace`" in refused.err.replace("\n", " ")
    called = call("trace", "--model", "moe", *SHORT, "--vram", "8")
    assert called.code == 0
    assert called.out.startswith("Fits: needs ")


@pytest.mark.usefixtures("no_estimate")
@pytest.mark.parametrize(("vram", "verdict"), [("0.36", "tight"), ("0.3", "does not fit")])
def test_a_family_without_an_estimate_has_a_verdict(call, vram: str, verdict: str) -> None:
    document = call("trace", "--model", "moe", *SHORT, "--vram", vram, "--json").document
    assert document["verdict"] == verdict
    assert call("trace", "--model", "moe", *SHORT, "--vram", vram, "--check").code == 3


def test_kind_stands_wherever_numbers_do(call) -> None:
    called = call("trace", "--model", "llama", *SHORT, "--vram", "8", "--why", "--explain")
    blocks = [block for block in called.out.split("\n\n") if "iB" in block]
    assert len(blocks) > 8
    assert all("traced" in block or "(estimated)" in block for block in blocks)


def test_json_is_what_the_python_api_returns(call) -> None:
    config = build_config({"model.id": "llama", "lora.rank": 16, "batch.sequence_length": 64}).config
    answer = trace(config).answer
    returned = json.loads(encode_json(answer))
    document = call("trace", "--model", "llama", *SHORT, "--json").document
    assert {key: document[key] for key in returned["estimate"]} == returned["estimate"]
    assert (document["alive"], document["num_events"]) == (returned["alive"], returned["num_events"])
    assert type(answer).create(**answer.to_dict()) == answer


def test_what_is_alive_adds_up_to_the_components(traced: Traced) -> None:
    answer = traced.answer
    sums: dict[str, int] = {}
    for group in answer.alive:
        sums[group.component] = sums.get(group.component, 0) + group.num_bytes
    parts = {part.name: part.num_bytes for part in answer.estimate.components if part.num_bytes}
    parts.pop("allocator slack", None)
    assert sums == parts


def test_why_groups_layers_and_puts_the_largest_first(traced: Traced) -> None:
    alive = traced.answer.alive
    assert [group.num_bytes for group in alive] == sorted((group.num_bytes for group in alive), reverse=True)
    (weights,) = [group for group in alive if group.name == "model.layers.*.mlp.up_proj.weight"]
    assert (weights.count, weights.shape, weights.dtype, weights.phase) == (3, (128, 64), "bfloat16", "load")
    assert weights.num_bytes == 3 * 128 * 64 * 2


def test_why_shows_twenty_and_the_sum_of_the_rest(call) -> None:
    plain = call("trace", "--model", "llama", *SHORT)
    why = call("trace", "--model", "llama", *SHORT, "--why")
    assert "Alive at the peak" not in plain.out
    extra = why.out.partition("Alive at the peak, in ")[2].splitlines()
    assert sum(" made in " in line for line in extra) == 20
    assert " more groups, all of them with --json" in extra[-1]


def test_events_file_replays_to_the_requested_peak(call) -> None:
    called = call("trace", "--model", "llama", *SHORT, "--events", "step.ndjson", "--json")
    head, *events = map(json.loads, Path("step.ndjson").read_text().splitlines())
    assert (head["schema"], head["kind"]) == ("foretune.events/1", "traced")
    assert head["num_events"] == len(events) == called.document["num_events"]
    now = most = 0
    for event in events:
        if event["event"] != "empty_cache":
            assert set(event) == {"event", "slot", "bytes", "name", "shape", "dtype", "phase", "component"}
            now += event["bytes"] if event["event"] == "allocate" else -event["bytes"]
            most = max(most, now)
    assert most == called.document["requested_bytes"]
    assert called.document["events_file"] == "step.ndjson"


def test_the_example_of_the_events_page_runs(call, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/events.md").read_text()
    document = call("trace", "--model", "llama", *SHORT, "--events", "step.ndjson", "--json").document
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    assert capsys.readouterr().out.startswith(f"{document['requested_bytes']:,} bytes")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--events", "llama/config.json"), "The file exists already."),
        (("--plot", "there.svg"), "The file exists already."),
        (("--plot", "step.png"), "The plot is an SVG."),
        (("--events", "nowhere/step.ndjson"), "The folder nowhere does not exist."),
        (("--events", "a", "--config", "a.yaml", "--config", "b.yaml"), "one file, but several configurations"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_traced(
    call, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], why: str
) -> None:
    Path("there.svg").write_text("mine")
    monkeypatch.setattr("foretune.api.trace", lambda *_, **__: pytest.fail("traced"))
    called = call("trace", "--model", "llama", *SHORT, *words)
    assert called.code == 2
    assert why in called.err
    assert Path("there.svg").read_text() == "mine"


def test_a_failed_write_leaves_nothing(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> Iterator[str]:
        yield "half a line"
        raise OSError(28, "No space left on device")

    before = sorted(path.name for path in Path().iterdir())
    monkeypatch.setattr("foretune.cli.trace.event_lines", broken)
    called = call("trace", "--model", "llama", *SHORT, "--events", "step.ndjson")
    assert (called.code, "No space left" in called.err) == (2, True)
    assert sorted(path.name for path in Path().iterdir()) == before


@pytest.mark.parametrize("device", [(), ("--vram", "1"), ("--vram", "80"), ("--vram", "2", "--free", "1")])
def test_plot_is_an_svg_with_words_for_who_cannot_see_it(call, device: tuple[str, ...]) -> None:
    called = call("trace", "--model", "llama", *SHORT, "--plot", "step.svg", *device)
    assert (called.code, called.err) == (0, "Written: step.svg\n")
    root = ET.parse("step.svg").getroot()
    texts = ["".join(element.itertext()) for element in root]
    assert root.get("role") == "img"
    assert "(traced)" in texts[0]
    assert "traced" in texts[1]
    assert "The peak lies in backward" in texts[1]
    assert not [line for line in Path("step.svg").read_text().splitlines() if "NaN" in line or "inf" in line]


def test_plot_marks_phases_and_the_card(call) -> None:
    call("trace", "--model", "llama", *SHORT, "--plot", "step.svg", "--vram", "0.045")
    text = Path("step.svg").read_text()
    assert all(f">{word}<" in text for word in ("load", "backward", "first update", "second update"))
    assert 'class="card"' in text
    assert "prefers-color-scheme: dark" in text


def test_plot_escapes_what_a_model_is_called(traced: Traced) -> None:
    answer = traced.answer
    named = answer.with_(estimate=answer.estimate.with_(model='<script>&"\x1b'))
    text = draw_plot(named, traced.timeline())
    ET.fromstring(text)
    assert "<script>" not in text


def test_timeline_keeps_the_peak_and_every_phase(traced: Traced) -> None:
    timeline = timeline_of(traced.trace.program, 60)
    position, most = timeline.peak
    assert len(timeline.positions) < 60 + 5 * len(timeline.bands)
    assert max(map(sum, timeline.columns)) == most
    assert position in timeline.positions
    sums = components_at(traced.trace.program, position, most)
    column = dict(zip(timeline.components, timeline.columns[timeline.positions.index(position)], strict=True))
    assert column == {name: sums[name] for name in column}
    assert {band.phase for band in timeline.bands} == set(traced.trace.program.phases) - {"save"}  # it has no events


# -- what is needed, and what is refused


def without(monkeypatch: pytest.MonkeyPatch, *names: str, **versions: str) -> None:
    """Hide libraries, or show others than are installed."""

    def version(name: str) -> str:
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name) or importlib.metadata.version(name)

    monkeypatch.setattr(libraries, "version", version)


def test_missing_extra_exits_7_with_the_line_to_run(call, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch", "peft")
    called = call("trace", "--model", "llama", *SHORT, "--json")
    assert called.code == 7
    assert called.document["error"]["hint"] == "Run: pip install 'foretune[train]'"
    assert "torch, peft are not installed" in called.document["error"]["message"]


def test_bitsandbytes_is_needed_only_where_it_is_used(call, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "bitsandbytes")
    words = ("trace", "--model", "llama", *SHORT)
    assert call(*words).code == 0
    assert call(*words, "--method", "qlora").code == 7
    assert call(*words, "--optimizer", "paged_adamw_8bit").code == 7


def test_untested_library_is_refused_with_the_line_to_run(call, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, transformers="5.25.1")
    called = call("trace", "--model", "llama", *SHORT)
    assert called.code == 2
    assert "pip install 'transformers>=5.24,<5.25'" in called.err


def test_installed_stack_has_the_versions_of_this_machine(call, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = find_stack("installed")
    assert stack.torch == importlib.metadata.version("torch")
    assert stack.description in call("trace", "--model", "llama", *SHORT, "--stack", "installed", "--json").out
    without(monkeypatch, "bitsandbytes")
    assert "bitsandbytes not installed" in find_stack("installed").description
    without(monkeypatch, torch="2.9.1")
    with pytest.raises(UnsupportedError, match=r"pip install 'torch>=2.10,<2.15'"):
        find_stack("installed")
    without(monkeypatch, "torch")
    with pytest.raises(MissingDependencyError, match="foretune"):
        find_stack("installed")


def test_another_loop_is_traced_with_todays_classes_and_says_so(call) -> None:
    called = call("trace", "--model", "llama", *SHORT, "--stack", "manual-loop")
    assert called.code == 0
    assert "stack manual-loop" in called.out
    assert "laid over the classes of Transformers" in " ".join(called.out.split())


def test_a_loop_without_a_chunked_loss_says_so(call) -> None:
    called = call("trace", "--model", "llama", *SHORT, "--stack", "manual-loop", "--loss", "chunked")
    assert called.code == 2
    assert "the stack manual-loop has no chunked loss" in called.err


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("batch.packing", ("--set", "batch.packing=true", "--attention", "flash_attention_2")),
    ],
)
def test_what_the_runtime_has_no_code_for_is_refused_by_name(call, field: str, words: tuple[str, ...]) -> None:
    called = call("trace", "--model", "llama", *SHORT, *words, "--json")
    assert called.code == 2
    assert [problem["field"] for problem in called.document["error"]["problems"]] == [field]


def test_an_8_bit_base_is_traced_as_an_experiment(call) -> None:
    words = ("--method", "qlora", "--set", "quantization.scheme=int8")
    called = call("trace", "--model", "llama", *SHORT, *words, "--json")
    assert called.code == 0
    assert any("8-bit base" in path for path in called.document["untested_paths"])
    assert call("estimate", "--model", "llama", *SHORT, *words).code == 0


def test_ligers_loss_is_traced_as_an_experiment(call) -> None:
    called = call("trace", "--model", "llama", *SHORT, "--loss", "liger", "--json")
    assert called.code == 0
    assert any("Liger" in path for path in called.document["untested_paths"])
    estimated = call("estimate", "--model", "llama", *SHORT, "--loss", "liger", "--json").document
    assert estimated["allocated_bytes"] == called.document["allocated_bytes"]
    assert estimated["untested_paths"] == called.document["untested_paths"]


def test_flash_attn_is_traced_as_an_experiment(call) -> None:
    called = call("trace", "--model", "llama", *SHORT, "--attention", "flash_attention_2", "--json")
    assert called.code == 0
    needed = called.document
    assert needed["attention_kernel"] == "flash-attn"
    assert any("experimental" in path for path in needed["untested_paths"])


def test_device_without_bfloat16_is_refused(call) -> None:
    called = call("trace", "--model", "llama", *SHORT, "--gpu", "t4")
    assert (called.code, "no bfloat16" in called.err) == (2, True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"_attn_implementation_internal": "eager"}, "_attn_implementation_internal"),
        ({"num_attention_heads": 7}, "Transformers refuses"),
        ({"hidden_act": "no-such"}, "cannot be run without data"),
        ({"model_type": "mamba", "state_size": 16, "expand": 2}, "Set attention: eager"),
    ],
)
def test_what_cannot_be_built_is_one_error(call, changes: dict[str, Any], why: str) -> None:
    Path("llama/config.json").write_text(json.dumps({**LLAMA, **changes}))
    called = call("trace", "--model", "llama", *SHORT)
    assert called.code == 2, called.err
    assert why in called.err
    assert len(called.err.splitlines()) <= 2
    assert "Traceback" not in called.err


def test_nothing_of_transformers_reaches_the_terminal(call) -> None:
    config = {**LLAMA, "model_type": "mamba2", "num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 16}
    Path("llama/config.json").write_text(json.dumps(config))
    called = call("trace", "--model", "llama", *SHORT, "--attention", "eager", "--json")
    assert (called.code, called.err) == (0, "")
    assert any("reference PyTorch implementation" in remark for remark in called.document["remarks"])


def test_catalogue_gives_the_config_that_its_shape_is_made_of() -> None:
    raw, shape = resolve_config("qwen2.5-0.5b"), resolve_model("qwen2.5-0.5b")
    assert raw["hidden_size"] == shape.traits.hidden_size
    assert raw["model_type"] == shape.model_type


@pytest.mark.parametrize("words", [("trace", "--help"), ("trace", "--model", "llama", "--plot", "step.png")])
def test_torch_is_imported_only_to_trace(words: tuple[str, ...]) -> None:
    program = "import sys; from foretune.cli.app import run; run(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_plot_shows_a_peak_of_a_single_event(traced: Traced) -> None:
    """The stack reaches the circle, though the peak may be one event of a hundred thousand."""
    drawing = draw_plot(traced.answer, traced.timeline())
    circle = re.search(r'<circle [^>]*cx="([\d.]+)" cy="([\d.]+)"', drawing)
    assert circle is not None
    points = [
        point.split(",") for text in re.findall(r'<polygon [^>]*points="([^"]+)"', drawing) for point in text.split()
    ]
    at_peak = [float(y) for x, y in points if abs(float(x) - float(circle[1])) <= 1]
    assert abs(min(at_peak) - float(circle[2])) < 0.2
