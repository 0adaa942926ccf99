"""Adapters merged into their base: PEFT's own weights, held against what was trained, written whole or not at all."""

import functools
import json
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data.made import TEMPLATES, made_tokenizer
from filelock import FileLock
from peft import PeftModel
from peft.tuners.lora import Linear
from runs.made_live import BF16, FAMILIES, NF4, family_folder
from runs.made_run import configured, conversation, copy_model, model_folder, write_rows
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import foretune.runtime.merge
from foretune.api import EvaluationAnswer, MergeAnswer, evaluate, merge, plan_merge, train
from foretune.contract import QuantizationSettings, TrainingConfig
from foretune.devices import DeviceSpec
from foretune.durable import verify_folder
from foretune.errors import (
    ConfigError,
    ForetuneError,
    RunDirectoryError,
    SaveError,
    UnsupportedError,
    VerificationError,
)
from foretune.evidence import MergeCheck, read_record
from foretune.memory.figures import facts_of
from foretune.models import WeightFiles, find_weights, read_safetensors_header, resolve_config, resolve_model
from foretune.runtime.artifact import read_artifact
from foretune.runtime.border import quietly
from foretune.runtime.load import four_bit_layers, load_model
from foretune.runtime.merge_layers import adapted_skeleton, replace_whole
from foretune.runtime.patched_files import compare_patched, write_patched

LORA = {"lora__rank": 4, "lora__alpha": 8.0}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256, "bos_token_id": 1}
INT8 = QuantizationSettings.create(scheme="int8")


@functools.cache
def base_folder(kind: str) -> Path:
    """Return a base that has something of its own; made once a process, to be read only."""
    if kind == "tied":
        return model_folder(tie_word_embeddings=True)
    if kind == "gpt2":
        return model_folder("gpt2", **GPT2)
    folder = Path(tempfile.mkdtemp(prefix="foretune-test-base-")) / "a-base"
    if kind in FAMILIES:
        shutil.copytree(family_folder(kind), folder)
        made_tokenizer("words").save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(TEMPLATES["markup"])
        return folder
    shutil.copytree(base_folder("gpt2") if kind == "bare gpt2" else model_folder(), folder)
    weights = load_file(folder / "model.safetensors")
    if kind == "bare gpt2":  # as the hub has it: no prefix
        weights = {name.removeprefix("transformer."): each for name, each in weights.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    elif kind == "bf16":
        save_file(
            {name: each.bfloat16() for name, each in weights.items()}, folder / "model.safetensors", {"format": "pt"}
        )
    elif kind == "shards":
        with quietly():
            model = AutoModelForCausalLM.from_pretrained(folder)
            (folder / "model.safetensors").unlink()
            model.save_pretrained(folder, max_shard_size="30KB")
    return folder


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {}),
    "rslora": ("llama", {**LORA, "lora__use_rslora": True}),
    "dora": ("llama", {**LORA, "lora__use_dora": True}),
    "whole": ("llama", {**LORA, "lora__modules_to_save": ["lm_head", "embed_tokens"]}),
    "tied": ("tied", {}),
    "gpt2": ("gpt2", {}),
    "gpt2 dora": ("gpt2", {**LORA, "lora__use_dora": True}),
    "bare gpt2": ("bare gpt2", {}),
    "bf16": ("bf16", {}),
    "bf16 dora": ("bf16", {**LORA, "lora__use_dora": True}),
    "shards": ("shards", {}),
    "experts": ("glm4_moe", {}),
    "tower": ("gemma3", {}),
    "nf4": ("bf16", {"schedule__updates": 12, "schedule__epochs": ..., "optimizer__learning_rate": 0.03}),
    "int8": ("bf16", {"schedule__updates": 12, "schedule__epochs": ..., "optimizer__learning_rate": 0.03}),
    "brief nf4": ("bf16", {"schedule__updates": 1, "schedule__epochs": ..., "optimizer__learning_rate": 1e-4}),
    "brief": ("bf16", {"schedule__updates": 1, "schedule__epochs": ..., "optimizer__learning_rate": 1e-6}),
    "full": ("llama", {"lora": None}),
}
UNQUANTIZED = [name for name in RUNS if name not in ("nf4", "int8", "brief nf4", "brief", "full")]
ONLY_FULL = {"lora", "gpt2", "bf16 dora", "shards"}
"""What another one shows as well, or another test."""


def config_of(folder: Path, name: str) -> TrainingConfig:
    base, changes = RUNS[name]
    model = model_folder() if base == "llama" else base_folder(base)
    config = configured(folder, model=model, **changes).config
    quantization = {"nf4": NF4, "brief nf4": NF4, "int8": INT8}.get(name)
    return config if quantization is None else config.with_(precision=BF16, quantization=quantization)


@functools.cache
def kept_run(name: str) -> Path:
    """Return a finished run, made once a process; to be read only."""
    folder = Path(tempfile.mkdtemp(prefix="foretune-test-merge-"))
    with quietly():
        *_, finished = train(config_of(folder, name))
    assert finished.record.is_success
    return folder / "run"


def run_of(name: str, folder: Path) -> Path:
    """Return a finished run that a test may change."""
    return Path(shutil.copytree(kept_run(name), folder / "run"))


def merged(run: Path, **options: Any) -> MergeAnswer:
    *_, answer = merge(str(run), **options)
    assert isinstance(answer, MergeAnswer)
    return answer


def base_of(run: Path) -> Path:
    return Path(read_record(run / "record.json").requested.model.id)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()}


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in sorted(folder.glob("model*.safetensors")) for name, each in load_file(path).items()}


def nothing_left(run: Path) -> bool:
    return not (run / "merged").exists() and not (run / "merges").exists() and not list(run.glob(".staged-*"))


# -- what is merged is what PEFT merges


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in ONLY_FULL else ()) for name in UNQUANTIZED]
)
def test_merged_weights_are_those_of_peft_rounded_once(name: str, tmp_path: Path) -> None:
    """LoRA, rsLoRA, DoRA, transposed weights, modules trained whole, names without a prefix, experts, shards."""
    run = run_of(name, tmp_path)
    answer = merged(run)
    assert answer.check.verdict == "verified", answer.check.because
    before, after = weights_in(base_of(run)), weights_in(run / "merged")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == len(answer.check.layers) + len(answer.check.replaced)
    assert len(before) - len(changed) == answer.check.num_copied
    assert {name: each.dtype for name, each in before.items()} == {name: each.dtype for name, each in after.items()}
    if name in ("experts", "tower"):  # PEFT's own loading takes their names for others (docs/training.md)
        assert answer.check.max_abs_logit_difference < 1e-6 < answer.check.training_logit_change
        return
    with quietly():
        model = AutoModelForCausalLM.from_pretrained(base_of(run), dtype=torch.float32)
        wanted = stored_by(PeftModel.from_pretrained(model, run / "adapter").merge_and_unload(), before)
    for key, each in wanted.items():
        assert torch.equal(after[key], each.to(before[key].dtype)), key


def stored_by(model: Any, names: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's tensors by the names of its files, which may lack the prefix."""
    state = model.state_dict()
    return {name: state[name if name in state else f"transformer.{name}"] for name in names}


@pytest.mark.parametrize("name", ["lora", "gpt2"])
def test_the_merged_folder_loads_by_transformers_alone(name: str, tmp_path: Path) -> None:
    run = run_of(name, tmp_path)
    merged(run)
    probe = load_file(run / "merged/probe.safetensors")
    with quietly():
        model = AutoModelForCausalLM.from_pretrained(run / "merged", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(run / "merged")
    with torch.no_grad():
        logits = model(input_ids=probe["ids.1"], use_cache=False).logits[0, -4:]
    assert torch.equal(logits, probe["logits.1"])
    assert tokenizer.chat_template == TEMPLATES["markup"]
    assert model.generation_config.eos_token_id == list(read_artifact(run / "adapter").stop_ids)


def test_the_merged_folder_is_an_artifact_that_evaluate_reloads(tmp_path: Path) -> None:
    run, rows = run_of("lora", tmp_path), write_rows(tmp_path / "other.jsonl", [conversation(7), conversation(8)])
    merged(run)
    verify_folder(run / "merged")
    described = read_artifact(run / "merged")
    assert (described.kind, described.weight_dtype, described.adapter_dtype) == ("model", "fp32", None)
    found = []
    for place in (run, run / "merged"):
        *_, answer = evaluate(str(place), data=str(rows))
        assert isinstance(answer, EvaluationAnswer)
        assert answer.record.probe is not None
        assert answer.record.probe.is_bitwise_equal
        found.append(answer)
    assert [answer.kind for answer in found] == ["adapter", "model"]
    assert [answer.record.artifact for answer in found] == ["adapter", "merged"]
    assert [Path(answer.record_file).name for answer in found] == ["0001.json", "0002.json"]
    assert found[0].loss == pytest.approx(found[1].loss, abs=1e-6)


def test_the_base_s_files_keep_their_shards_and_their_index(tmp_path: Path) -> None:
    run = run_of("shards", tmp_path)
    merged(run)
    before = sorted(path.name for path in base_of(run).glob("*.safetensors*"))
    assert len(before) > 3
    assert sorted(path.name for path in (run / "merged").glob("model*")) == before
    for name in before[:-1]:
        assert read_safetensors_header(base_of(run) / name) == read_safetensors_header(run / "merged" / name)


# -- rounding


def test_a_base_in_16_bit_says_how_much_of_the_adapter_rounding_took(tmp_path: Path) -> None:
    check = merged(run_of("bf16", tmp_path)).check
    assert {layer.dtype for layer in check.layers} == {"bf16"}
    shares = [layer.lost_to_rounding for layer in check.layers]
    assert min(shares) > 0
    assert max(shares) < 0.05
    assert "for rounding in bf16" in check.because
    assert all(layer.lost_to_rounding == 0 for layer in merged(run_of("lora", tmp_path / "other")).check.layers)


def test_an_adapter_that_rounding_swallows_is_not_verified(tmp_path: Path) -> None:
    """Its change is below half a unit in the last place of bf16, so the merged weights are the base's."""
    check = merged(run_of("brief", tmp_path)).check
    assert check.verdict == "not verified"
    assert check.most_rounded is not None
    assert check.most_rounded.lost_to_rounding > 0.5
    assert "half of the" in check.because


def test_a_module_that_was_trained_whole_says_so_too(tmp_path: Path) -> None:
    """Trained in fp32, written in the base's bf16."""
    base = base_folder("bf16")
    changes = {**LORA, "lora__modules_to_save": ["lm_head"]}
    with quietly():
        *_, finished = train(configured(tmp_path, model=base, **changes).config)
    check = merged(Path(finished.folder)).check
    assert [(each.name, each.dtype) for each in check.replaced] == [("lm_head.weight", "bf16")]
    assert 0 < check.replaced[0].lost_to_rounding < 0.1 < check.replaced[0].change


def test_a_sum_that_the_format_cannot_hold_is_refused() -> None:
    trained, stored = torch.full((4, 4), 131072.0), torch.ones(4, 4, dtype=torch.float16)
    with pytest.raises(VerificationError, match="holds values that fp16 cannot hold"):
        replace_whole("lm_head.weight", trained, stored)
    kept, facts = replace_whole("lm_head.weight", trained / 4, stored)
    assert (kept.dtype, facts.lost_to_rounding) == (torch.float16, 0.0)


# -- a quantized base


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_adapters_of_a_quantized_base_go_into_the_unquantized_one_with_the_difference(
    name: str, tmp_path: Path
) -> None:
    run = run_of(name, tmp_path)
    check = merged(run).check
    stored, own = load_file(run / "adapter/probe.safetensors"), load_file(run / "merged/probe.safetensors")
    difference = max(float((stored[key] - own[key]).abs().max()) for key in ("logits.0", "logits.1"))
    assert check.max_abs_logit_difference == pytest.approx(difference)
    assert 0 < check.mean_abs_logit_difference < difference
    assert check.bound == pytest.approx(check.training_logit_change / 2)
    assert (check.verdict, check.quantization) == ("verified", name)
    assert all(layer.from_training is not None and 0 < layer.from_training < 1 for layer in check.layers)
    assert {each.dtype for each in weights_in(run / "merged").values()} == {torch.bfloat16}


def test_the_distance_of_a_layer_is_that_of_the_weights_that_were_trained(tmp_path: Path) -> None:
    """Held against the base as the loader of training quantizes it."""
    run = run_of("nf4", tmp_path)
    layer = next(each for each in merged(run).check.layers if each.name == "model.layers.1.mlp.down_proj")
    config = read_record(run / "record.json").requested
    with quietly():
        base = load_model(
            resolve_config(config.model.id),
            base_of(run),
            precision=config.precision,
            quantization=config.quantization,
            attention=config.attention,
            device="cpu",
        ).model
    from peft.utils.integrations import dequantize_module_weight

    weight = dequantize_module_weight(dict(four_bit_layers(base))[layer.name]).float()
    adapters = load_file(run / "adapter/adapter_model.safetensors")
    parts = [adapters[f"base_model.model.{layer.name}.lora_{letter}.weight"] for letter in "AB"]
    trained = weight + 2.0 * parts[1] @ parts[0]
    own = weights_in(run / "merged")[f"{layer.name}.weight"].float()
    assert layer.from_training == pytest.approx(float((own - trained).norm() / trained.norm()), rel=1e-3)


def test_a_merge_beyond_its_bound_is_written_and_not_verified(tmp_path: Path, call: Callable[..., Any]) -> None:
    """One update changed less than quantization did."""
    run = run_of("brief nf4", tmp_path)
    called = call("merge", str(run))
    assert (called.code, "merged, not verified" in called.out) == (0, True), called.err
    assert "**Not verified.**" in (run / "merged/README.md").read_text()
    shutil.rmtree(run / "merged")
    called = call("merge", str(run), "--check", "--json")
    check = called.document["record"]["merge_check"]
    assert (called.code, check["verdict"]) == (3, "not verified")
    assert check["max_abs_logit_difference"] > check["bound"]
    assert (run / "merged/model.safetensors").is_file()


# -- wrong merges


delta_weight = Linear.get_delta_weight


def negated(self: Any, adapter: str) -> torch.Tensor:
    return -delta_weight(self, adapter)


def scaled(self: Any, adapter: str) -> torch.Tensor:
    return 1.001 * delta_weight(self, adapter)


def nothing(self: Any, adapter: str) -> torch.Tensor:
    return torch.zeros_like(delta_weight(self, adapter))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("lora", negated), ("lora", nothing), ("bf16", scaled), ("nf4", nothing), ("dora", negated), ("gpt2", scaled)],
)
def test_a_weight_that_is_not_what_its_layer_does_is_refused(
    name: str, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(name, tmp_path)
    monkeypatch.setattr(Linear, "get_delta_weight", wrong)
    with pytest.raises(VerificationError, match="is not what the layer and its adapter do"):
        merged(run)
    assert nothing_left(run)


def test_a_layer_that_keeps_the_base_s_weight_is_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its own check: only the logits can tell."""
    original = foretune.runtime.merge.merge_layer

    def forgetful(change: Any, stored: torch.Tensor, **options: Any) -> Any:
        tensor, facts = original(change, stored, **options)
        return (stored if "layers.1.mlp.down_proj" in change.name else tensor), facts

    monkeypatch.setattr(foretune.runtime.merge, "merge_layer", forgetful)
    check = merged(run_of("lora", tmp_path)).check
    assert check.verdict == "not verified"
    assert check.max_abs_logit_difference > 10 * check.bound


def test_a_file_that_is_not_what_was_merged_is_a_save_error(tmp_path: Path) -> None:
    source, target = model_folder() / "model.safetensors", tmp_path / "copy.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    weights = load_file(source)
    digests = write_patched(source, target, {name}, lambda each: weights[each] + 1)
    compare_patched(source, target, digests)
    assert torch.equal(load_file(target)[name], weights[name] + 1)
    data, start = bytearray(target.read_bytes()), read_safetensors_header(source)[name].start
    for place, said in ((start, "up_proj"), (start - 1, "only copied"), (len(data) - 1, "only copied")):
        damaged = bytearray(data)
        damaged[place] ^= 1
        target.write_bytes(damaged)
        with pytest.raises(SaveError, match=said):
            compare_patched(source, target, digests)
    target.write_bytes(data[:-1])
    with pytest.raises(SaveError, match="its size"):
        compare_patched(source, target, digests)


# -- what is refused, before anything is written


def refused(run: Path, kind: type[ForetuneError], said: str, **options: Any) -> None:
    for journey in (lambda: plan_merge(str(run), **options), lambda: merged(run, **options)):
        with pytest.raises(kind, match=said):
            journey()
    assert not list(run.glob(".staged-*"))


def test_a_full_run_has_nothing_to_merge(tmp_path: Path) -> None:
    refused(run_of("full", tmp_path), RunDirectoryError, "there is nothing to merge")


@pytest.mark.parametrize("outcome", ["started", "interrupted", "oom"])
def test_a_run_without_success_is_refused(outcome: str, tmp_path: Path) -> None:
    run = run_of("lora", tmp_path)
    record = json.loads((run / "record.json").read_text())
    (run / "record.json").write_text(json.dumps({**record, "outcome": outcome}))
    refused(run, RunDirectoryError, f"no artifact: its outcome is {outcome}")
    refused(tmp_path / "nothing", RunDirectoryError, "does not exist")


def test_a_busy_run_is_refused(tmp_path: Path) -> None:
    run = run_of("lora", tmp_path)
    with FileLock(run / "lock"), pytest.raises(RunDirectoryError, match="is busy"):
        merged(run)
    assert nothing_left(run)


def test_another_base_or_a_changed_adapter_is_refused(tmp_path: Path) -> None:
    base = copy_model(tmp_path)
    settings = {**json.loads((base / "config.json").read_text()), "auto_map": {"AutoModelForCausalLM": "other.Model"}}
    (base / "config.json").write_text(json.dumps(settings))
    *_, finished = train(configured(tmp_path, model=base).config)
    run = Path(finished.folder)
    merged(run, output=str(tmp_path / "elsewhere"))
    assert "auto_map" not in json.loads((tmp_path / "elsewhere/config.json").read_text())
    shutil.rmtree(run / "merges")
    weights = load_file(base / "model.safetensors")
    save_file(
        {**weights, "lm_head.weight": weights["lm_head.weight"] + 1}, base / "model.safetensors", {"format": "pt"}
    )
    refused(run, RunDirectoryError, "not those that were trained on")
    with (run / "adapter/adapter_model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    refused(run, SaveError, "differs from its manifest")
    assert nothing_left(run)


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_an_output_that_exists_is_refused_and_stays(make: Any, tmp_path: Path) -> None:
    run = run_of("lora", tmp_path)
    make(run / "merged")
    before = (run / "merged").lstat()
    refused(run, RunDirectoryError, "exists already")
    assert (run / "merged").lstat() == before
    assert merged(run, output=str(tmp_path / "models/mine")).record.artifact == str(tmp_path / "models/mine")
    assert (tmp_path / "models/mine/model.safetensors").is_file()


@pytest.mark.parametrize("inside", ["run/adapter/mine", "run/checkpoints/mine", "base/mine"])
def test_an_output_inside_what_is_listed_or_not_ours_is_refused(inside: str, tmp_path: Path) -> None:
    run = run_of("lora", tmp_path)
    place = base_of(run) / "mine" if inside.startswith("base") else run / inside.removeprefix("run/")
    refused(run, RunDirectoryError, "stands inside", output=str(place))
    assert not place.exists()


def test_an_output_below_a_file_is_told_as_what_it_is(tmp_path: Path) -> None:
    run = run_of("lora", tmp_path)
    (tmp_path / "rows.jsonl").touch()
    refused(run, RunDirectoryError, "rows.jsonl is a file", output=str(tmp_path / "rows.jsonl/mine"))


def test_memory_is_planned_for_a_single_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = foretune.runtime.merge.host_bytes

    def of_one(task: Any) -> int:
        seen.append(real(task._replace(skeleton=task.skeleton._replace(layers=task.skeleton.layers[:1], whole={}))))
        return seen[-1]

    monkeypatch.setattr(foretune.runtime.merge, "host_bytes", of_one)
    assert plan_merge(str(run_of("lora", tmp_path))).host_bytes == seen[0] > 0


def test_a_plan_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    there = WeightFiles("acme/base", "0" * 40, None, ("model.safetensors",))
    monkeypatch.setattr("foretune.api.evaluation.find_weights", lambda *_, **__: there)
    with pytest.raises(ConfigError, match="acme/base are not on this machine, and a plan downloads nothing"):
        plan_merge(str(kept_run("lora")))


def test_a_disk_or_a_memory_that_is_too_small_is_told_with_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("lora", tmp_path)
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr("foretune.runtime.preflight.shutil.disk_usage", lambda _: usage(1 << 30, 1 << 30, 1 << 20))
        refused(run, ConfigError, r"16\.\d MiB are written at .*, and 1\.0 MiB are free")
    little = DeviceSpec(name="this machine's memory", total_bytes=1 << 30, total_is="reported", free_bytes=1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr("foretune.api.merging.host_memory", lambda: little)
        refused(run, ConfigError, r"up to 384\.\d MiB .* \(estimated\), and 1\.0 MiB are available")
    assert nothing_left(run)


def test_memory_is_planned_by_the_largest_weight_or_by_what_is_copied(tmp_path: Path) -> None:
    """Files in the run's own format are the model's memory; of another format they are copied."""
    own, other = plan_merge(str(kept_run("nf4"))), plan_merge(str(kept_run("bf16")))
    size = (base_of(kept_run("bf16")) / "model.safetensors").stat().st_size
    assert other.host_bytes - own.host_bytes > size
    assert own.disk_bytes == other.disk_bytes > size


def test_weights_that_are_put_together_when_loaded_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretune.runtime.merge_layers.stored_names", lambda model, stored: {})
    refused(run_of("lora", tmp_path), UnsupportedError, "is put together from other tensors")


def test_tied_weights_that_were_trained_apart_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run of ours trains them (case 135); what another one did is refused all the same."""
    base = base_folder("tied")
    config = configured(tmp_path, model=base).config
    facts = facts_of(config, resolve_model(str(base)))
    assert config.lora is not None
    apart = config.with_(lora=config.lora.with_(modules_to_save=("lm_head",)))
    monkeypatch.setattr("foretune.runtime.merge_layers.load_adapters", lambda *_: None)
    said = r"lm_head.weight was trained apart, .* for model.embed_tokens.weight"
    with quietly(), pytest.raises(UnsupportedError, match=said):
        adapted_skeleton(
            apart,
            facts,
            resolve_config(str(base)),
            kept_run("tied") / "adapter",
            attention="sdpa",
            tensors=find_weights(str(base)).tensors(),
        )


# -- faces


def test_a_plan_writes_nothing_and_says_what_there_would_be(tmp_path: Path, call: Callable[..., Any]) -> None:
    run = run_of("nf4", tmp_path)
    called = call("merge", str(run), "--dry-run", "--json")
    plan = called.document
    assert (called.code, plan["schema"]) == (0, "foretune.merge.plan/1")
    assert (plan["num_layers"], plan["num_copied"], plan["quantization"], plan["dtypes"]) == (14, 7, "nf4", ["bf16"])
    text = call("merge", str(run), "--dry-run").out
    assert "Nothing was written." in text
    assert "merged into the unquantized one" in text
    assert nothing_left(run)


def test_the_record_says_what_was_merged_and_the_card_how_to_go_on(tmp_path: Path, call: Callable[..., Any]) -> None:
    run = run_of("bf16", tmp_path)
    called = call("merge", str(run), "--check")
    assert called.code == 0, called.err
    assert "merged, verified" in called.out
    assert "Merging layer by layer" in called.err
    record = read_record(run / "merges/0001.json")
    assert (record.kind, record.artifact, record.is_success) == ("merge", "merged", True)
    assert isinstance(record.merge_check, MergeCheck)
    assert any(each.startswith("peft ") for each in record.code.libraries)
    card = (run / "merged/README.md").read_text()
    for text in ("convert_hf_to_gguf.py merged", "--outtype bf16", "llama-quantize", "**Verified.**", "a-base"):
        assert text in card
    for name in ("README.md", "artifact.json", "config.json"):
        assert str(base_of(run).parent) not in (run / "merged" / name).read_text()
