"""`foretune estimate`: what its flags mean, what its answer holds, what it exits with."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from foretune import api
from foretune.api import EstimateAnswer, build_config, estimate
from foretune.cli.request import FLAGS, TEXT_FIELDS
from foretune.contract.fields import find_field
from foretune.values import encode_json

SMALL = ("estimate", "--model", "gpt2", "--offline")
FILE = "model: {id: gpt2}\nprecision: {dtype: bf16}\nlora: {rank: 4}\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(FILE)
    return "run.yaml"


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (("--seq-len", "512"), "batch.sequence_length", 512),
        (("--micro-batch", "4"), "batch.micro_batch_size", 4),
        (("--accumulation", "8"), "batch.accumulation_steps", 8),
        (("--rank", "8"), "lora.rank", 8),
        (("--alpha", "1e1"), "lora.alpha", 10.0),
        (("--targets", "mlp"), "lora.targets", "mlp"),
        (("--targets", "c_attn,c_fc"), "lora.targets", ["c_attn", "c_fc"]),
        (("--dtype", "fp32"), "precision.dtype", "fp32"),
        (("--optimizer", "sgd"), "optimizer.name", "sgd"),
        (("--attention", "eager"), "attention", "eager"),
        (("--loss", "chunked"), "loss", "chunked"),
        (("--no-gradient-checkpointing",), "gradient_checkpointing", False),
        (("--set", "optimizer.learning_rate=1e-3"), "optimizer.learning_rate", 0.001),
        (("--method", "full"), "lora", None),
    ],
)
def test_flag_sets_its_field_and_says_so(call, words, path, value) -> None:
    document = call(*SMALL, *words, "--json").document
    found: Any = document["config"]
    for name in path.split("."):
        found = found[name]
    assert found == value
    assert document["origins"][path]["source"] == ("default" if path == "lora" else "command line")


def test_flags_name_fields_that_exist() -> None:
    assert all(find_field(field) is not None for _, field in FLAGS.values())
    assert all(find_field(field) is not None for field in TEXT_FIELDS)


@pytest.mark.parametrize(
    ("words", "method"),
    [
        ((), "lora"),
        (("--method", "full"), "full"),
        (("--model", "qwen2.5-0.5b", "--method", "qlora"), "qlora"),
        (("--model", "qwen2.5-0.5b", "--set", "quantization.scheme=nf4"), "qlora"),
        (("--set", "lora=null"), "full"),
    ],
)
def test_method_is_lora_unless_something_else_is_said(call, words, method) -> None:
    model = () if "--model" in words else ("--model", "gpt2")
    assert call("estimate", "--offline", *model, *words, "--json").document["method"] == method


def test_default_dtype_is_bf16_and_says_that_it_is_the_command_lines() -> None:
    loaded = build_config({"model.id": "gpt2"})
    assert loaded.config.precision.dtype == "bf16"
    assert loaded.origins["precision.dtype"].source == "command-line default"


def test_contradicting_flags_are_refused(call) -> None:
    assert "takes no section lora" in call(*SMALL, "--method", "full", "--rank", "8").err
    assert "contradicts" in call(*SMALL, "--rank", "8", "--set", "lora.rank=9").err


def test_flag_beats_file(call, file: str) -> None:
    document = call("estimate", "--config", file, "--rank", "32", "--offline", "--json").document
    assert document["config"]["lora"]["rank"] == 32
    assert document["origins"]["lora.rank"] == {"source": "command line", "place": "--rank"}
    assert document["origins"]["precision.dtype"] == {"source": "file", "place": "run.yaml:2:13"}
    assert document["config_file"] == "run.yaml"


def test_text_of_several_files_has_a_block_each(call, file: str) -> None:
    called = call("estimate", "--config", file, "--config", file, "--offline")
    assert called.out.count("run.yaml\nNeeds ") == 2


def test_json_is_what_the_python_api_returns(call) -> None:
    config = build_config({"model.id": "gpt2", "lora.rank": 16}).config
    answer = estimate(config, offline=True)
    returned = json.loads(encode_json(answer))
    document = call(*SMALL, "--json").document
    assert {key: document[key] for key in returned["estimate"]} == returned["estimate"]
    assert document["config"] == returned["config"]
    assert (document["verdict"], document["fit"]) == (None, None)


def test_answer_survives_json() -> None:
    config = build_config({"model.id": "gpt2", "lora.rank": 16}).config
    answer = estimate(config, offline=True)
    assert EstimateAnswer.create(**answer.to_dict()) == answer


def test_components_add_up_to_the_allocated_peak(call) -> None:
    document = call(*SMALL, "--json").document
    assert sum(document["components_bytes"].values()) == document["allocated_bytes"]
    assert {part["name"]: part["num_bytes"] for part in document["components"]} == document["components_bytes"]


def need_gib(call: Any) -> float:
    return call(*SMALL, "--json").document["need_bytes"] / (1 << 30)


def test_check_turns_the_verdict_into_an_exit_code(call) -> None:
    need = need_gib(call)
    assert call(*SMALL, "--vram", f"{need + 0.1:.3f}", "--check").code == 0
    assert call(*SMALL, "--vram", "0.2", "--check").code == 3
    assert call(*SMALL, "--vram", "0.2").code == 0


def test_accept_tight_accepts_only_tight(call) -> None:
    size = f"{need_gib(call) - 0.05:.3f}"
    assert call(*SMALL, "--vram", size, "--json").document["verdict"] == "tight"
    assert call(*SMALL, "--vram", size, "--check").code == 3
    assert call(*SMALL, "--vram", size, "--check", "--accept", "tight").code == 0
    assert call(*SMALL, "--vram", "0.2", "--check", "--accept", "tight").code == 3


def test_free_memory_is_the_budget(call) -> None:
    fit = call(*SMALL, "--gpu", "3090", "--free", "1", "--json").document["fit"]
    assert (fit["budget_bytes"], fit["budget_is"]) == (1 << 30, "free now")


def test_no_comes_with_the_largest_component_and_the_nearest_changes(call) -> None:
    called = call("estimate", "--model", "qwen2.5-7b", "--vram", "8", "--offline")
    assert called.out.startswith("Does not fit: needs ")
    assert "largest part is weights" in called.out.replace("\n", " ")
    assert "(--method qlora --loss chunked)" in called.out
    fit = call("estimate", "--model", "qwen2.5-7b", "--vram", "8", "--offline", "--json").document["fit"]
    assert len(fit["changes"]) == 3


def test_kind_stands_wherever_numbers_do(call) -> None:
    called = call(*SMALL, "--vram", "8", "--explain")
    blocks = [block for block in called.out.split("\n\n") if "iB" in block]
    assert all("estimated" in block for block in blocks)


def test_explain_shows_formula_inputs_and_source_of_each_component(call) -> None:
    plain, explained = call(*SMALL), call(*SMALL, "--explain")
    document = call(*SMALL, "--json").document
    assert explained.out.startswith(plain.out)
    extra = explained.out[len(plain.out) :]
    assert extra.count("Source: ") == len(document["components"])
    assert all(f"\n{part['name']}: " in extra for part in document["components"])


@pytest.mark.parametrize("words", [(), ("--method", "qlora"), ("--gpu", "t4", "--dtype", "fp16")])
def test_text_is_short(call, words) -> None:
    called = call("estimate", "--model", "qwen2.5-0.5b", "--offline", *words)
    assert len(called.out.splitlines()) <= 51


def test_model_that_caps_its_scores_gets_eager_on_the_command_line(call) -> None:
    words = ("estimate", "--model", "google/gemma-2-2b", "--offline")
    document = call(*words, "--json").document
    assert document["config"]["attention"] == "eager"
    assert document["origins"]["attention"]["source"] == "command-line default"
    assert "attention: eager (command-line default" in call(*words).out
    assert call(*words, "--attention", "sdpa").code == 2


def test_file_that_leaves_such_a_model_at_sdpa_is_refused(call, file: str) -> None:
    Path(file).write_text(FILE.replace("gpt2", "google/gemma-2-2b"))
    called = call("estimate", "--config", file, "--offline")
    assert called.code == 2
    assert "attention: eager" in called.err


def test_model_published_only_quantized_is_unknown_with_the_reason(call, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = api.resolve_model("gpt2").with_(published_only_as="mxfp4")
    monkeypatch.setattr(api, "resolve_model", lambda *_, **__: shape)
    called = call(*SMALL, "--vram", "80", "--check")
    assert called.code == 3
    assert called.out.startswith("Unknown: ")
    assert "published only as mxfp4" in called.out.replace("\n", " ")


def test_refusal_says_where_the_field_was_set(call, file: str) -> None:
    Path(file).write_text(f"{FILE}loss: chunked\n")
    words = ("--stack", "trainer")
    assert "run.yaml:4:1: loss is chunked" in call("estimate", "--config", file, "--offline", *words).err
    assert "--loss: loss is chunked" in call(*SMALL, "--loss", "chunked", *words).err


def test_detect_without_a_gpu_says_why(call, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretune import devices
    from foretune.devices import Detection

    monkeypatch.setattr(devices, "detect_devices", lambda: Detection((), "no driver answers"), raising=False)
    called = call(*SMALL, "--detect")
    assert called.code == 2
    assert "no driver answers" in called.err


def test_detect_takes_what_is_free_now(call, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretune import devices
    from foretune.devices import Detection, device_from_memory

    found = Detection((device_from_memory(8 << 30, 6 << 30),))
    monkeypatch.setattr(devices, "detect_devices", lambda: found, raising=False)
    assert call(*SMALL, "--detect", "--json").document["fit"]["budget_bytes"] == 6 << 30


def test_stack_is_named_in_the_answer(call) -> None:
    assert call(*SMALL, "--stack", "manual-loop", "--json").document["stack"].startswith("manual-loop")


NOES = [
    "--model qwen2.5-7b --method full --vram 24",
    "--model llama-3.1-8b --method lora --vram 12",
    "--model qwen2.5-7b --micro-batch 8 --seq-len 4096 --vram 24",
    "--model qwen2.5-7b --method qlora --micro-batch 4 --seq-len 4096 --accumulation 2 --vram 24",
    "--model qwen2.5-3b --no-gradient-checkpointing --seq-len 2048 --vram 8",
    "--model llama-3.1-8b --method qlora --vram 8 --seq-len 512",
]


@pytest.mark.parametrize("words", NOES)
def test_a_proposed_change_put_behind_the_command_gives_what_it_promised(call, words: str) -> None:
    """No contradiction, the same need, the same verdict."""
    from foretune.cli.drawing import flags_of
    from foretune.memory import Change

    command = ["estimate", "--offline", *words.split()]
    answer = json.loads(call(*command, "--json").out)
    changes = [Change.create(**change) for change in answer["fit"]["changes"]]
    assert changes
    for change in changes:
        flags = " ".join(flags_of(change, answer["method"], has_file=False)).split()
        again = json.loads(call(*command, *flags, "--json").out)
        assert (again["need_bytes"], again["verdict"]) == (change.need_bytes, change.verdict)


def test_a_proposed_change_beats_what_the_file_says(call, file: str) -> None:
    from foretune.cli.drawing import flags_of
    from foretune.memory import Change

    Path(file).write_text("model: {id: qwen2.5-7b}\nprecision: {dtype: bf16}\nlora: null\n")
    command = ["estimate", "--offline", "--config", file, "--vram", "24"]
    answer = json.loads(call(*command, "--json").out)
    for change in answer["fit"]["changes"]:
        flags = " ".join(flags_of(Change.create(**change), "full", has_file=True)).split()
        assert json.loads(call(*command, *flags, "--json").out)["need_bytes"] == change["need_bytes"]


# -- the plot


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("device", [(), ("--vram", "2"), ("--vram", "80"), ("--vram", "8", "--free", "2")])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_plot_is_an_svg_that_says_estimated(call, here: Path, method: str, device: tuple[str, ...]) -> None:
    called = call(*SMALL, "--method", method, "--plot", "step.svg", *device)
    assert (called.code, called.err) == (0, "Written: step.svg\n")
    text = Path("step.svg").read_text()
    elements = ["".join(element.itertext()) for element in ET.fromstring(text)]
    assert "(estimated)" in elements[0]
    assert "Memory over one fine-tune from loading to the second update, estimated." in elements[1]
    assert "at the peak (estimated)" in elements
    assert "traced" not in text
    assert not re.search(r"NaN|inf\b", text)
    assert ('class="card"' in text or "above: " in text) == bool(device)


def test_plot_marks_the_peak_of_the_answer(call, here: Path) -> None:
    document = call(*SMALL, "--plot", "step.svg", "--json").document
    assert document["plot_file"] == "step.svg"
    assert (call(*SMALL, "--json").document["plot_file"]) is None
    text = Path("step.svg").read_text()
    assert text.count("<circle") == 1
    assert f"peak {document['allocated_bytes'] / (1 << 20):.1f} MiB" in text


def test_timeline_is_of_the_program_that_the_estimate_rests_on() -> None:
    config = build_config({"model.id": "gpt2", "lora.rank": 16}).config
    needed, timeline = estimate(config, offline=True).estimate, api.estimate_timeline(config, offline=True)
    assert needed is not None
    sums = {part.name: part.num_bytes for part in needed.components}
    highest = max(timeline.columns, key=sum)
    assert dict(zip(timeline.components, highest, strict=True)) == {name: sums[name] for name in timeline.components}
    assert timeline.peak[1] == needed.allocated_bytes - sums["allocator slack"]
    assert {band.phase for band in timeline.bands} <= {phase.phase for phase in needed.phases}


def test_program_that_is_replayed_with_fewer_layers_is_drawn_whole(
    call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*SMALL[:1], "--model", "qwen2.5-0.5b", "--offline")
    assert call(*words, "--plot", "whole.svg").code == 0
    monkeypatch.setattr("foretune.memory.estimate.MAX_EVENTS", 20_000)
    called = call(*words, "--plot", "step.svg")
    assert "So long a program is replayed with fewer layers" in " ".join(called.out.split())
    counts = [re.findall(r"([\d,]+) allocations and frees", Path(f).read_text()) for f in ("whole.svg", "step.svg")]
    assert counts[0] == counts[1]


def test_program_that_is_too_long_to_be_drawn_is_refused(call, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretune.memory.estimate.MAX_EMITTED", 5000)
    called = call(*SMALL, "--plot", "step.svg")
    assert called.code == 2
    assert "too many to be drawn: at most 5,000 are." in called.err
    assert not Path("step.svg").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--plot", "there.svg"), "there.svg: The file exists already."),
        (("--plot", "step.png"), "--plot step.png: The plot is an SVG."),
        (("--plot", "nowhere/step.svg"), "The folder nowhere does not exist."),
        (("--plot", "a.svg", "--config", "a.yaml", "--config", "b.yaml"), "--plot: one file, but several"),
    ],
)
def test_plot_that_cannot_be_written_is_refused_before_anything_is_estimated(
    call, here: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], why: str
) -> None:
    Path("there.svg").write_text("mine")
    monkeypatch.setattr("foretune.api.estimate", lambda *_, **__: pytest.fail("estimated"))
    called = call(*SMALL, *words)
    assert called.code == 2
    assert why in called.err
    assert Path("there.svg").read_text() == "mine"


def test_what_is_refused_has_no_plot(call, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(*SMALL, "--loss", "chunked", "--stack", "trl", "--plot", "step.svg").code == 2
    shape = api.resolve_model("gpt2").with_(published_only_as="mxfp4", model_type="no-such")
    monkeypatch.setattr(api, "resolve_model", lambda *_, **__: shape)
    assert call(*SMALL).out.startswith("Unknown: ")
    called = call(*SMALL, "--plot", "step.svg")
    assert called.code == 2
    assert "not estimated yet" in called.err
    assert not Path("step.svg").exists()


def test_plot_needs_no_torch(here: Path) -> None:
    program = "import sys; from foretune.cli.app import run; run(sys.argv[1:]); print('torch' in sys.modules)"
    words = [*SMALL, "--plot", "step.svg"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


# -- plans from data

ROWS = [64, 64, 100, 100, 100, 300, 300, 500, 900, 2000]


@pytest.fixture
def lengths(here: Path) -> str:
    Path("rows.jsonl").write_text("".join(f"{row}\n" for row in ROWS))
    return "rows.jsonl"


def test_each_need_is_that_of_rows_of_its_length(call, lengths: str) -> None:
    words = ("estimate", "--model", "qwen2.5-0.5b", "--offline", "--micro-batch", "2", "--vram", "5", "--json")
    document = call(*words, "--lengths", lengths).document
    by_length = document["lengths"]
    needs = {need["rows"]: need for need in by_length["needs"]}
    assert {rows: need["tokens"] for rows, need in needs.items()} == {
        "p50": 100,
        "p95": 2000,
        "longest": 2000,
        "worst micro batch": 1024,
        "packed": 1024,
    }
    assert [need["is_beyond"] for need in by_length["needs"]] == [False, True, True, False, False]
    packed = ("--set", "batch.packing=true")
    for tokens, rows, more in ((100, "p50", ()), (2000, "longest", ()), (1024, "packed", packed)):
        alone = call(*words, "--seq-len", str(tokens), *more).document
        figures = ("need_bytes", "allocated_bytes", "reserved_bytes", "verdict")
        assert {name: needs[rows][name] for name in figures} == {name: alone[name] for name in figures}
    assert (needs["p50"]["verdict"], needs["longest"]["verdict"]) == ("fits", "does not fit")
    assert needs["worst micro batch"]["need_bytes"] == document["need_bytes"]


def test_packed_rows_of_a_class_that_lets_them_leak_have_no_need(call, lengths: str) -> None:
    words = ("estimate", "--model", "bigscience/bloom-560m", "--offline", "--lengths", lengths, "--json")
    *_, packed = call(*words).document["lengths"]["needs"]
    assert (packed["rows"], packed["need_bytes"], packed["is_beyond"]) == ("packed", None, False)
    assert "batch.packing" in packed["refused_because"]


def test_lengths_count_rows_tokens_and_what_is_cut(call, lengths: str) -> None:
    """Of the rows all but one stay whole; it loses 2,000 - 1,024 tokens. In rising order a pair is padded to its
    second row."""
    words = (*SMALL, "--micro-batch", "2", "--lengths", lengths, "--json")
    found = call(*words).document["lengths"]
    assert (found["file"], found["kind"]) == (lengths, "estimated")
    data, real = found["data"], sum(ROWS) - 976
    assert (data["num_rows"], data["num_tokens"], data["mean_tokens"]) == (10, sum(ROWS), sum(ROWS) / 10)
    assert (data["shortest"], data["p50"], data["p95"], data["longest"]) == (64, 100, 2000, 2000)
    assert found["long_rows"] == {"num_rows": 1, "share": 0.1, "tokens_beyond": 976}
    assert found["padding"]["order"] == "random"
    assert found["packing"] == {"row_tokens": 1024, "num_rows": 4, "real_share": real / 4096}
    ordered = call(*words, "--set", "batch.sort_by_length=true").document["lengths"]["padding"]
    padded = 2 * (64 + 100 + 300 + 500 + 1024)
    assert (ordered["order"], ordered["mean_tokens"]) == ("sorted by length", padded / 10)
    assert ordered["real_share"] == pytest.approx(real / padded)
    assert ordered["worst_tokens"] == 1024


def test_lengths_are_what_the_python_api_returns(call, lengths: str) -> None:
    config = build_config({"model.id": "gpt2", "lora.rank": 16}).config
    answer = api.estimate_lengths(config, api.read_lengths(lengths), device=api.find_device("3090"), offline=True)
    document = call(*SMALL, "--gpu", "3090", "--lengths", lengths, "--json").document
    assert document["lengths"] == {"file": lengths, **json.loads(encode_json(answer))}
    assert api.LengthsAnswer.create(**answer.to_dict()) == answer
    assert call(*SMALL, "--json").document["lengths"] is None


def test_lengths_are_shown_below_the_estimate(call, lengths: str) -> None:
    words = (*SMALL, "--micro-batch", "2", "--vram", "8")
    plain, called = call(*words).out, call(*words, "--lengths", lengths).out
    assert called.startswith(plain)
    extra = called[len(plain) :]
    assert "\nBy the lengths in rows.jsonl (estimated)\n" in extra
    text = " ".join(extra.split())
    assert "10 rows, 4,428 tokens: 64 to 2,000 a row, 442.8 in the mean." in text
    assert "1 row (10.0 %) is longer than batch.sequence_length, 1,024; 976 tokens lie beyond it." in text
    assert "Packed to 1,024 tokens: 4 rows; 84.3 % of the tokens real." in text
    assert "drawn at random without replacement" in text
    assert "data.truncation is error: a run refuses rows of more than 1,024 tokens." in text
    assert re.search(r"\n  p50 +100 +[\d.,]+ [MG]iB  fits\n", extra)
    assert max(map(len, called.splitlines())) <= 80


def test_rows_that_cannot_be_run_whole_are_part_of_the_answer(call, lengths: str) -> None:
    """GPT-2 has 1,024 learned positions."""
    called = call(*SMALL, "--lengths", lengths, "--set", "data.truncation=right")
    assert called.code == 0
    assert re.search(r"\n  longest +2,000 +refused, too long\n", called.out)
    text = " ".join(called.out.split())
    assert "longest, 2,000 tokens: batch.sequence_length is 2000, but openai-community/gpt2 has a table of 1024" in text
    assert "data.truncation is right: a run cuts rows of more than 1,024 tokens." in text


@pytest.mark.parametrize("form", ['{"%d": 1}', '{"tokens": %d}', '{"length": %d, "count": 3}'])
def test_one_length_is_all_of_them(call, here: Path, form: str) -> None:
    Path("rows.jsonl").write_text(form % 77)
    found = call(*SMALL, "--micro-batch", "4", "--lengths", "rows.jsonl", "--json").document["lengths"]
    assert [need["tokens"] for need in found["needs"]] == [77, 77, 77, 77, 1024]
    assert found["padding"]["real_share"] == 1
    assert any("fewer rows than a micro batch takes" in text for text in found["assumptions"])


@pytest.mark.parametrize(
    ("text", "place", "why"),
    [
        (None, "rows.jsonl", "does not exist"),
        ("", "rows.jsonl", "There is no length in it."),
        ("64\n-1\n", "rows.jsonl:2", "The line is -1,"),
        ('64\n\n{"token": 5}\n', "rows.jsonl:3", "The key 'token' is not known."),
        ('{\n"64": 0}', "rows.jsonl:2", "The count of 64 is 0,"),
        ("\x1b[2J", "rows.jsonl:1", "It is not JSON"),
    ],
)
def test_lengths_that_cannot_be_read_exit_5(call, here: Path, text: str | None, place: str, why: str) -> None:
    if text is not None:
        Path("rows.jsonl").write_text(text)
    called = call(*SMALL, "--lengths", "rows.jsonl", "--plot", "step.svg")
    assert (called.code, called.out) == (5, "")
    assert f"{place}: " in called.err
    assert why in called.err
    document = call(*SMALL, "--lengths", "rows.jsonl", "--json").document
    assert (document["error"]["code"], document["error"]["exit_code"]) == ("data", 5)
    assert document["error"]["problems"][0]["place"] == place
    assert not Path("step.svg").exists()


def test_what_is_refused_has_no_needs(call, lengths: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(*SMALL, "--loss", "chunked", "--stack", "trl", "--lengths", lengths).code == 2
    shape = api.resolve_model("gpt2").with_(published_only_as="mxfp4")
    monkeypatch.setattr(api, "resolve_model", lambda *_, **__: shape)
    found = call(*SMALL, "--lengths", lengths, "--json").document["lengths"]
    assert {need["verdict"] for need in found["needs"] if need["need_bytes"]} == {"unknown"}
    shape = shape.with_(model_type="no-such")
    called = call(*SMALL, "--lengths", lengths)
    assert called.code == 2
    assert "published only as mxfp4" in called.err


def test_lengths_are_read_once_for_several_files(call, lengths: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.yaml").write_text(FILE)
    read, calls = api.read_lengths, []
    monkeypatch.setattr(api, "read_lengths", lambda file: (calls.append(file), read(file))[1], raising=False)
    called = call("estimate", "--config", "a.yaml", "--config", "a.yaml", "--offline", "--lengths", lengths, "--json")
    answers = [json.loads(line) for line in called.out.splitlines()]
    assert [answer["lengths"]["data"]["num_rows"] for answer in answers] == [10, 10]
    assert calls == [lengths]


def test_check_is_about_rows_of_sequence_length(call, lengths: str) -> None:
    words = ("estimate", "--model", "qwen2.5-0.5b", "--offline", "--vram", "8", "--check", "--lengths", lengths)
    assert call(*words).code == 0


def test_lengths_and_plot_work_together(call, lengths: str) -> None:
    document = call(*SMALL, "--lengths", lengths, "--plot", "step.svg", "--json").document
    assert (document["plot_file"], document["lengths"]["file"]) == ("step.svg", lengths)
    assert Path("step.svg").exists()
