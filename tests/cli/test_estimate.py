"""`foretune estimate`: what its flags mean, what its answer holds, what it exits with."""

import json
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
    assert "takes no lora" in call(*SMALL, "--method", "full", "--rank", "8").err
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
    assert len(called.out.splitlines()) <= 48


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
