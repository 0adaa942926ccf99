"""Runs that went wrong for users of other tools, asked of a tiny model that is really trained.

The numbers are those of the cases; docs/cases.md lists every case and who holds it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data.made import made_tokenizer
from runs.made_live import BF16, NF4
from runs.made_run import configured, copy_model, model_folder, write_config, write_rows
from safetensors.torch import load_file, save_file

from foretune.api import EvaluationAnswer, MergeAnswer, evaluate, merge, plan_merge, plan_training, train
from foretune.api.prediction import Predicted
from foretune.contract import TrainingConfig
from foretune.errors import (
    ConfigError,
    DataError,
    ForetuneError,
    RunDirectoryError,
    SaveError,
    UnsupportedError,
    VerificationError,
)
from foretune.evidence import RunRecord, read_record
from foretune.models import resolve_model, resolve_targets
from foretune.models.targets import lora_parameters
from foretune.runtime.run_events import RunFinished, UpdateDone


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETUNE_CACHE", str(tmp_path / "kept"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-cache"))
    monkeypatch.setattr("foretune.api.planning.predict", lambda *_: Predicted(None))


def config_of(folder: Path, **changes: Any) -> TrainingConfig:
    return configured(folder, **changes).config


def finished(config: TrainingConfig, **options: Any) -> RunFinished:
    *_, last = train(config, **options)
    assert isinstance(last, RunFinished)
    return last


def quantized(config: TrainingConfig) -> TrainingConfig:
    """Return the same on a 4-bit base, past the contract's rule that it is for CUDA."""
    return config.with_(precision=BF16, quantization=NF4)


def losses(config: TrainingConfig) -> list[float]:
    return [event.loss for event in train(config) if isinstance(event, UpdateDone)]


def record_of(folder: Path) -> RunRecord:
    return read_record(folder / "run/record.json")


def effective(record: RunRecord, field: str) -> set[str]:
    return {check.effective for check in record.checks if check.field == field}


def evaluated(run: Path, **options: Any) -> EvaluationAnswer:
    *_, answer = evaluate(str(run), **options)
    assert isinstance(answer, EvaluationAnswer)
    return answer


def rows_with(folder: Path, *answers: str) -> str:
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    return str(write_rows(folder / "given.jsonl", rows))


# -- memory and disk ---------------------------------------------------------------------------------------------


def test_case_004_only_sums_leave_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretune.runtime.live import Live
    from foretune.runtime.step import TrainingStep

    given: list[tuple[int, ...]] = []
    forward = TrainingStep.forward

    def noted(self: TrainingStep, *batch: Any) -> Any:
        out = forward(self, *batch)
        given.append(tuple(out.shape))
        return out

    monkeypatch.setattr(TrainingStep, "forward", noted)
    finished(config_of(tmp_path, evaluation__split=0.5))
    assert set(given) == {()}
    assert Live.__dataclass_fields__.keys().isdisjoint({"logits", "predictions"})


def test_cases_007_008_131_a_save_that_fails_leaves_no_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file in place of the adapters is found before the artifact has its name."""
    from foretune.runtime import artifact

    save = artifact.save_file

    def emptied(tensors: dict[str, Any], path: Path, **options: Any) -> None:
        if path.name == "adapter_model.safetensors":
            tensors = {name: tensor[:0].clone() for name, tensor in tensors.items()}
        save(tensors, path, **options)

    monkeypatch.setattr(artifact, "save_file", emptied)
    with pytest.raises(SaveError, match="is empty"):
        finished(config_of(tmp_path))
    assert record_of(tmp_path).outcome == "save-error"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("record.json", "config.yaml", "updates.jsonl", "checkpoints", "lock"),
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: {name: tensor * float("nan") for name, tensor in tensors.items()}, "not finite"),
        (lambda tensors: {name: tensor + 1 for name, tensor in tensors.items()}, "differs from the tensor"),
        (lambda tensors: dict(list(tensors.items())[1:]), "is missing"),
    ],
)
def test_case_131_what_is_saved_is_compared_with_what_was_trained(
    change: Callable[[dict[str, Any]], dict[str, Any]], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foretune.runtime import artifact

    save = artifact.save_file

    def changed(tensors: dict[str, Any], path: Path, **options: Any) -> None:
        save(change(tensors) if path.name == "adapter_model.safetensors" else tensors, path, **options)

    monkeypatch.setattr(artifact, "save_file", changed)
    with pytest.raises(SaveError, match=words):
        finished(config_of(tmp_path))
    assert not (tmp_path / "run/adapter").exists()


def test_case_036_a_disk_that_is_too_small_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("foretune.runtime.preflight.shutil.disk_usage", lambda _: usage(1 << 30, 1 << 30, 1 << 20))
    with pytest.raises(ConfigError, match=r"writes up to .* 1\.0 MiB are free"):
        finished(config_of(tmp_path, checkpoint__every_updates=1))
    assert not (tmp_path / "run").exists()


def test_case_006_merging_is_planned_by_itself_and_needs_no_card(tmp_path: Path) -> None:
    finished(quantized(config_of(tmp_path, schedule__updates=2, schedule__epochs=...)))
    plan = plan_merge(str(tmp_path / "run"))
    assert plan.disk_bytes > (model_folder() / "model.safetensors").stat().st_size
    assert plan.available_host_bytes is not None
    assert 0 < plan.host_bytes < plan.available_host_bytes
    *_, answer = merge(str(tmp_path / "run"))
    assert isinstance(answer, MergeAnswer)
    assert (answer.plan.host_bytes, answer.check.device) == (plan.host_bytes, "cpu")


def test_cases_035_039_122_dtypes_and_places_are_read_from_the_living_model(tmp_path: Path) -> None:
    """The file says bf16, the configuration fp32: fp32 is loaded, and both dtypes stand in the record."""
    model = copy_model(tmp_path)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    record = finished(config_of(tmp_path, model=model)).record
    assert effective(record, "precision.dtype") == {"fp32"}
    assert effective(record, "precision.adapter_dtype") == {"fp32"}
    assert effective(record, "device") == {"cpu"}


def test_case_027_a_card_without_bf16_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretune.api import find_device
    from foretune.devices.detect import Detection
    from foretune.runtime import preflight

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(preflight, "detect_devices", lambda: Detection((find_device("t4"),)))
    with pytest.raises(ConfigError, match="has no bfloat16"):
        finished(config_of(tmp_path, device="cuda", precision__dtype="bf16"))
    assert read_record(tmp_path / "run.failed-start.json").outcome == "config-error"


def test_without_a_card_cuda_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this machine has none"):
        finished(config_of(tmp_path, device="cuda"))


# -- loading -----------------------------------------------------------------------------------------------------


def test_case_105_an_unmatched_target_stops_and_the_coverage_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nonexistent_proj"):
        finished(config_of(tmp_path, **{"lora.targets": ["q_proj", "nonexistent_proj"]}))
    record = finished(config_of(tmp_path, **{"lora.targets": ["q_proj", "v_proj"]})).record
    assert effective(record, "lora.targets") == {"4 layers"}


def test_case_106_planner_and_run_train_the_same_number(tmp_path: Path) -> None:
    """A model with fused projections, as Phi-3 has them."""
    model = model_folder("phi3", pad_token_id=0)
    shape = resolve_model(str(model))
    expected = lora_parameters(resolve_targets(shape, "all-linear"), 16)
    config = config_of(tmp_path, model=model, **{"lora.rank": 16})
    *_, plan = plan_training(config)
    assert plan.trainable_params == expected
    assert effective(finished(config).record, "trainable parameters") == {f"{expected:,}"}


def test_case_107_the_code_of_a_repository_never_runs(tmp_path: Path) -> None:
    """A known type whose config names a class of its own: Transformers' class is taken, without a question."""
    model = copy_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (model / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    record = finished(config_of(tmp_path, model=model)).record
    assert record.base is not None
    assert record.base.model_class == "LlamaForCausalLM"
    assert evaluated(tmp_path / "run").record.is_success
    assert not (tmp_path / "ran").exists()


def test_case_109_another_base_than_the_one_of_the_run_is_refused(tmp_path: Path) -> None:
    model = copy_model(tmp_path)
    record = finished(config_of(tmp_path, model=model)).record
    assert record.base is not None
    assert record.base.weights_sha256 is not None
    settings = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(model)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunDirectoryError, match="not those that were trained on"):
        evaluated(tmp_path / "run")


def test_case_109_the_resolved_commit_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` of a cached repository moves after the run: the run's own commit is loaded again."""
    import shutil

    commit, repository = "c" * 40, tmp_path / "hub/models--a--tiny"
    shutil.copytree(model_folder(), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    record = finished(config_of(tmp_path, model="a/tiny")).record
    assert record.base is not None
    assert record.base.resolved_revision == commit
    artifact = json.loads((tmp_path / "run/adapter/artifact.json").read_text())
    assert artifact["base"]["resolved_revision"] == commit
    assert json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())["revision"] == commit
    (repository / "refs/main").write_text("d" * 40)
    probe = evaluated(tmp_path / "run", offline=True).record.probe
    assert probe is not None
    assert probe.is_bitwise_equal


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_case_118_each_allowed_attention_is_finite_on_padded_rows_and_agrees(family: str, tmp_path: Path) -> None:
    model = model_folder(family, head_dim=8, pad_token_id=0)
    eager = config_of(tmp_path, model=model, attention="eager", output=str(tmp_path / "eager"))
    fused = eager.with_(attention="sdpa", output=str(tmp_path / "sdpa"))
    expected = losses(eager)
    if family == "gemma2":
        with pytest.raises(UnsupportedError, match="refuses for"):
            losses(fused)
    else:
        assert losses(fused) == pytest.approx(expected, abs=1e-3)


# -- updates -----------------------------------------------------------------------------------------------------


def test_case_125_accumulation_is_the_large_batch(tmp_path: Path) -> None:
    """Rows of very different lengths, four at once or one after another."""
    rows = rows_with(tmp_path, "Yes.", "Yes. No.", "Yes, the answer is 4.", "Over there. " * 6)
    shared = {"data__train": rows, "schedule__updates": 2, "schedule__epochs": ..., "lora": None}
    large = config_of(tmp_path, batch__micro_batch_size=4, output=str(tmp_path / "large"), **shared)
    small = config_of(
        tmp_path, batch__micro_batch_size=1, batch__accumulation_steps=4, output=str(tmp_path / "small"), **shared
    )
    assert losses(large) == pytest.approx(losses(small), abs=1e-5)
    one, two = (load_file(tmp_path / name / "model/model.safetensors") for name in ("large", "small"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5


def test_case_126_the_last_group_of_an_epoch_is_an_update_of_its_own(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, num_rows=10, batch__accumulation_steps=4, schedule__epochs=1.0, optimizer__learning_rate=1e-9
    )
    *_, plan = plan_training(config)
    assert (plan.updates_per_epoch, plan.microsteps_per_update, plan.last_microsteps) == (2, 4, 1)
    first, last = losses(config)
    alone = config.with_(batch=config.batch.with_(accumulation_steps=1), output=str(tmp_path / "alone"))
    by_batch = losses(alone)
    assert last == pytest.approx(by_batch[4], rel=1e-5)
    assert min(by_batch[:4]) < first < max(by_batch[:4])


def test_case_127_a_run_without_a_peak_is_refused_and_a_plan_says_its_updates(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(Path("run.yaml"), tmp_path, num_rows=3, batch__accumulation_steps=16, batch__micro_batch_size=1)
    plan = call("train", "run.yaml", "--dry-run", "--json").document
    assert (plan["num_updates"], plan["peak_learning_rate"]) == (2, 0.01)
    refused = call("train", "run.yaml", "--dry-run", "--set", "schedule.warmup_updates=100")
    assert (refused.code, "never reach its peak" in refused.err) == (2, True)
    record = finished(config_of(tmp_path)).record
    assert effective(record, "trained weights") == {"changed"}


def test_case_128_a_folder_with_a_run_is_refused_and_nothing_in_it_changes(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    finished(config)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(RunDirectoryError, match=r"foretune evaluate .* reloads it"):
        finished(config)
    with pytest.raises(RunDirectoryError, match="is finished"):
        finished(config, resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


# -- artifacts ---------------------------------------------------------------------------------------------------


def test_case_130_the_artifact_is_loaded_by_its_own_class_and_changes_the_logits(tmp_path: Path) -> None:
    finished(config_of(tmp_path))
    probe = evaluated(tmp_path / "run").record.probe
    assert probe is not None
    assert probe.max_abs_difference <= 1e-4
    described = tmp_path / "run/adapter/artifact.json"
    assert json.loads(described.read_text())["base"]["model_class"] == "LlamaForCausalLM"


def test_case_130_adapters_that_would_not_be_applied_are_refused(tmp_path: Path) -> None:
    """Names with another prefix match nothing: a silent no-op elsewhere."""
    finished(config_of(tmp_path))
    path = tmp_path / "run/adapter/adapter_model.safetensors"
    weights = {name.replace("model.layers", "language_model.layers"): each for name, each in load_file(path).items()}
    save_file(weights, path)
    (tmp_path / "run/adapter/manifest.json").write_text("{}")
    with pytest.raises(VerificationError, match="do not fit the base"):
        evaluated(tmp_path / "run")


def test_an_artifact_that_was_changed_is_refused(tmp_path: Path) -> None:
    finished(config_of(tmp_path))
    path = tmp_path / "run/adapter/adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(SaveError, match="differs from its manifest"):
        evaluated(tmp_path / "run")


def test_case_133_a_merge_into_16_bit_reports_its_difference_and_is_not_verified_above_a_bound(tmp_path: Path) -> None:
    """One update changes less than 4 bits do; a training that changes more is verified."""
    verdicts = []
    for updates, rate in ((1, 1e-4), (12, 0.03)):
        folder = tmp_path / str(updates)
        folder.mkdir()
        changes = {"schedule__updates": updates, "schedule__epochs": ..., "optimizer__learning_rate": rate}
        finished(quantized(config_of(folder, **changes)))
        *_, answer = merge(str(folder / "run"))
        assert isinstance(answer, MergeAnswer)
        check = answer.check
        assert 0 < check.mean_abs_logit_difference < check.max_abs_logit_difference
        assert check.is_verified == (check.max_abs_logit_difference <= check.bound)
        assert read_record(Path(answer.record_file)).merge_check == check
        verdicts.append(check.verdict)
    assert verdicts == ["not verified", "verified"]


def test_case_135_trained_embeddings_and_head_of_a_tied_model_are_refused(tmp_path: Path) -> None:
    model = model_folder("llama", tie_word_embeddings=True)
    with pytest.raises(ForetuneError, match="head too"):
        finished(config_of(tmp_path, model=model, **{"lora.modules_to_save": ["embed_tokens", "lm_head"]}))


def test_case_135_a_tied_model_that_is_trained_whole_reloads_equal(tmp_path: Path) -> None:
    model = model_folder("llama", tie_word_embeddings=True)
    finished(config_of(tmp_path, model=model, lora=None))
    probe = evaluated(tmp_path / "run").record.probe
    assert probe is not None
    assert probe.is_bitwise_equal


def test_case_136_the_artifact_holds_its_prompt_format_and_another_is_refused(tmp_path: Path) -> None:
    finished(config_of(tmp_path))
    form = json.loads((tmp_path / "run/adapter/artifact.json").read_text())["format"]
    assert form["kind"] == "messages"
    assert len(form["sha256"]) == 64
    assert form["example_prompt"].endswith("<|im_start|>assistant\n")
    with pytest.raises(ConfigError, match="instruction is asked for"):
        evaluated(tmp_path / "run", prompts=("Hi",), format="instruction")


def test_case_137_both_stop_tokens_end_an_answer_and_the_mismatch_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template ends turns with <|im_end|>, the base's generation with </s>."""
    record = finished(config_of(tmp_path)).record
    tokenizer = made_tokenizer("words")
    turn_end, eos = tokenizer.convert_tokens_to_ids("<|im_end|>"), 2
    described = json.loads((tmp_path / "run/adapter/artifact.json").read_text())
    assert set(described["stop_ids"]) == {turn_end, eos}
    assert any("generation does not stop" in text for text in record.warnings)
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def says_the_end(self: Any, *arguments: Any, **keywords: Any) -> Any:
        out = forward(self, *arguments, **keywords)
        if keywords.get("use_cache"):
            out.logits[..., turn_end] = 1e4
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", says_the_end)
    monkeypatch.setattr("foretune.runtime.reload.TOLERANCES", {"fp32": 1e9})
    said = evaluated(tmp_path / "run", prompts=("Hi",), max_new_tokens=9).generations[0]
    assert (said.text, said.ended_by) == ("", "stop")


def test_case_138_the_seed_decides_adapters_order_and_losses(tmp_path: Path) -> None:
    one = finished(config_of(tmp_path, output=str(tmp_path / "one"))).record
    two = finished(config_of(tmp_path, output=str(tmp_path / "two"))).record
    assert (one.init_adapter_sha256, one.row_order_sha256) == (two.init_adapter_sha256, two.row_order_sha256)
    assert one.scope is not None
    assert two.scope is not None
    assert (one.scope.first_loss, one.scope.last_loss) == (two.scope.first_loss, two.scope.last_loss)


def test_case_139_a_tokenizer_that_pads_on_the_left_changes_nothing(tmp_path: Path) -> None:
    model = copy_model(tmp_path)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "padding_side": "left"}))
    left = losses(config_of(tmp_path, model=model))
    assert left == losses(config_of(tmp_path, output=str(tmp_path / "right")))
    alone = evaluated(tmp_path / "run", prompts=("Is it?",), max_new_tokens=4).generations[0]
    both = evaluated(tmp_path / "run", prompts=("Is it?", "Where is the answer?"), max_new_tokens=4).generations
    assert both[0] == alone


def test_case_145_a_base_without_a_template_takes_no_conversations(tmp_path: Path) -> None:
    model = copy_model(tmp_path)
    (model / "chat_template.jinja").unlink()
    with pytest.raises((DataError, UnsupportedError), match="no chat template"):
        finished(config_of(tmp_path, model=model))


def test_case_146_the_adapter_s_dtype_is_told_at_save_and_at_reload(tmp_path: Path) -> None:
    finished(config_of(tmp_path))
    described = json.loads((tmp_path / "run/adapter/artifact.json").read_text())
    probe = evaluated(tmp_path / "run").record.probe
    assert probe is not None
    assert (described["adapter_dtype"], probe.adapter_dtype, probe.tolerance) == ("fp32", "fp32", 1e-4)


def test_case_147_libraries_outside_the_tested_range_are_refused_and_labels_have_a_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = finished(config_of(tmp_path)).record
    assert record.data is not None
    assert len(record.data.label_sha256) == 64
    from foretune.runtime import libraries

    known = libraries.version_of
    monkeypatch.setattr(libraries, "version_of", lambda name: "5.30.0" if name == "transformers" else known(name))
    with pytest.raises(UnsupportedError, match="outside the tested range"):
        finished(config_of(tmp_path, output=str(tmp_path / "other")))


# -- rows --------------------------------------------------------------------------------------------------------


def test_cases_043_112_pad_is_an_id_that_is_there_and_the_vocabulary_stays(tmp_path: Path) -> None:
    model = copy_model(tmp_path)
    before = json.loads((model / "config.json").read_text())["vocab_size"]
    record = finished(config_of(tmp_path, model=model, lora=None)).record
    assert record.pad is not None
    assert record.pad.source == "eos"
    assert json.loads((tmp_path / "run/model/config.json").read_text())["vocab_size"] == before


def test_case_095_the_scope_of_the_loss_stands_in_the_record(tmp_path: Path) -> None:
    answers = finished(config_of(tmp_path, output=str(tmp_path / "answers"))).record
    everything = finished(config_of(tmp_path, data__supervision="all_tokens", output=str(tmp_path / "all"))).record
    assert answers.data is not None
    assert everything.data is not None
    assert answers.data.num_tokens == everything.data.num_tokens
    assert answers.data.num_supervised_tokens < everything.data.num_supervised_tokens
    assert answers.requested.data.supervision == "assistant_only"


def test_case_090_packed_runs_prove_their_isolation_and_stop_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, batch__packing=True)
    assert effective(finished(config).record, "packed examples") == {"isolated"}
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    with pytest.raises(VerificationError, match="not isolated"):
        finished(config.with_(output=str(tmp_path / "leaking")))
    assert read_record(tmp_path / "leaking/record.json").outcome == "verification-error"
