"""Configurations of other tools: every key is accounted for once, and what the file means is what we take."""

from collections import Counter
from pathlib import Path

import pytest
from foreign.expected import EXPECTED, Expected

from foretune.contract import dump_config, parse_config
from foretune.contract.document import read_document, read_text
from foretune.contract.fields import Leaf, find_field
from foretune.errors import ConfigError
from foretune.foreign import TOOLS, ImportedConfig, build_imported, import_config
from foretune.foreign.reader import flatten, read_foreign
from foretune.foreign.yaml11 import read_yaml11

CONFIGS = Path(__file__).parent / "configs"
FILES = sorted(path for path in CONFIGS.glob("*/*") if path.is_file())
NAMES = [f"{path.parent.name}/{path.name}" for path in FILES]


def write(folder: Path, text: str, name: str = "file.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def open_points(imported: ImportedConfig) -> set[str]:
    return {one.field or one.keys[0] for one in imported.decisions}


def decided(file: Path) -> ImportedConfig:
    """Import a file with everything decided that it leaves open."""
    values = {
        "batch.sequence_length": "512", "data.train": "rows.jsonl", "evaluation.data": "other.jsonl",
        "schedule.warmup_updates": "0", "lora.modules_to_save": "[]", "evaluation.split": "0.1", "model.id": "gpt2",
    }  # fmt: skip
    first = import_config(file)
    overrides = [
        f"{one.field}={values[one.field]}" if one.field in values else one.flag.removeprefix("--set ")
        for one in first.decisions
        if one.field is not None
    ]
    without = [one.keys[0] for one in first.decisions if one.field is None]
    return import_config(file, overrides=overrides, without=without)


def test_each_tool_has_eight_files_with_a_meaning() -> None:
    assert set(EXPECTED) == set(NAMES)
    assert min(Counter(path.parent.name for path in FILES).values()) >= 8


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_every_key_is_accounted_for_once(file: Path) -> None:
    imported = import_config(file)
    found = read_foreign(file)
    keys = [key for key, _, _ in flatten(found.keys, TOOLS[imported.tool].keys)]
    assert Counter(entry.key for entry in imported.entries if entry.place is not None) == Counter(keys)
    open_keys = {key for one in imported.decisions for key in one.keys}
    assert open_keys == {entry.key for entry in imported.of("refused", "to decide", "unknown")}


@pytest.mark.parametrize(("name", "expected"), EXPECTED.items(), ids=EXPECTED)
def test_file_means_what_its_tool_reads(name: str, expected: Expected) -> None:
    imported = import_config(CONFIGS / name)
    by_file = {one.field: one.value for one in imported.settings if one.place is not None}
    by_default = {one.field: one.value for one in imported.settings if one.place is None}
    assert {field: by_file.get(field) for field in expected.settings} == expected.settings
    assert {field: by_default.get(field) for field in expected.defaults} == expected.defaults
    assert open_points(imported) == expected.open
    assert {key: getattr(imported.stack, key) for key in expected.stack} == expected.stack


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_tool_is_told_by_the_file(file: Path) -> None:
    assert import_config(file).tool == file.parent.name.replace("_", "-")


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_place_is_the_line_of_the_key(file: Path) -> None:
    lines = read_text(str(file)).splitlines()
    for entry in import_config(file).entries:
        if entry.place is not None:
            line, column = map(int, entry.place.rsplit(":", 2)[1:])
            name = entry.key.rpartition(".")[2].removesuffix("]").partition("[")[0]
            assert name in lines[line - 1][column - 1 :].replace("-", "_").replace("no_", "")


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_default_of_the_tool_is_listed_where_it_is_not_ours(file: Path) -> None:
    imported = import_config(file)
    listed = {one.field for entry in imported.entries if entry.place is None for one in entry.settings}
    for setting in imported.settings:
        leaf = find_field(setting.field)
        assert isinstance(leaf, Leaf)
        if setting.place is None and setting.value != leaf.default:
            assert setting.field in listed


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_what_is_decided_makes_a_configuration_that_loads_again(file: Path) -> None:
    imported = decided(file)
    assert imported.decisions == ()
    assert imported.config is not None
    assert parse_config(dump_config(imported.config)).config == imported.config


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_estimate_needs_no_decision_about_rows(file: Path) -> None:
    imported = import_config(file)
    fields = {one.field for one in imported.open_for_estimate}
    assert not fields & {"data.train", "evaluation.data", "schedule.warmup_updates", "data.supervision"}
    if not imported.open_for_estimate and not imported.file.endswith("dora_fp16.yml"):
        assert build_imported(imported, "estimate").config.data.train is None


def test_what_the_user_sets_beats_the_file(tmp_path: Path) -> None:
    file = CONFIGS / "llama_factory/qlora.yaml"
    imported = import_config(file, overrides=["schedule.epochs=2", "data.train=x.jsonl", "lora.rank=4"])
    assert imported.config is not None
    assert (imported.config.schedule.epochs, imported.config.schedule.updates) == (2.0, None)
    assert imported.config.lora is not None
    assert imported.config.lora.rank == 4
    assert {entry.key for entry in imported.of("decided")} >= {"lora_rank", "max_steps", "dataset"}


def test_warmup_share_is_of_the_updates_that_the_user_sets() -> None:
    file = CONFIGS / "llama_factory/lora_chat.yaml"
    imported = import_config(file, overrides=["schedule.updates=250"])
    assert ("schedule.warmup_updates", 25) in {(one.field, one.value) for one in imported.settings}


def test_key_left_out_counts_as_not_given() -> None:
    imported = import_config(
        CONFIGS / "llama_factory/freeze.yaml", without=["max_samples", "per_device_train_batch"][:1]
    )
    assert "max_samples" not in open_points(imported)
    assert [entry.key for entry in imported.of("decided")] == ["max_samples"]
    with pytest.raises(ConfigError, match="no key 'max_sample'"):
        import_config(CONFIGS / "llama_factory/freeze.yaml", without=["max_sample"])


def test_base_that_is_published_quantized_is_refused_by_its_key(tmp_path: Path) -> None:
    text = "base_model: {}\nsequence_len: 64\nmicro_batch_size: 1\nbf16: true\nlearning_rate: 1e-4\n"
    found = {
        name: [one.keys for one in import_config(write(tmp_path, text.format(name))).open_for_estimate]
        for name in ("TheBloke/Llama-2-7B-GPTQ", "unsloth/llama-3-8b-bnb-4bit", "some/Model-AWQ", "Qwen/Qwen2.5-7B")
    }
    assert list(found.values()) == [[("base_model",)], [("base_model",)], [("base_model",)], []]


def test_learning_rate_that_axolotl_asks_for_is_asked_for(tmp_path: Path) -> None:
    file = write(tmp_path, "base_model: gpt2\nsequence_len: 64\nmicro_batch_size: 1\nbf16: true\n")
    assert "optimizer.learning_rate" in open_points(import_config(file))


def test_mapping_is_left_out_as_a_whole() -> None:
    imported = import_config(CONFIGS / "axolotl/deepspeed.yml", without=["special_tokens", "datasets"])
    assert {entry.key for entry in imported.of("decided")} == {
        "special_tokens.eos_token", "special_tokens.pad_token", "datasets[0].path", "datasets[0].type",
        "datasets[1].path", "datasets[1].type",
    }  # fmt: skip
    assert "data.train" in open_points(imported)


def test_cut_cross_entropy_is_on_with_its_plugin(tmp_path: Path) -> None:
    text = "base_model: gpt2\nsequence_len: 64\nmicro_batch_size: 1\nbf16: true\nlearning_rate: 1e-4\nplugins: [{}]\n{}"
    name = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
    losses = [
        {one.field: one.value for one in import_config(write(tmp_path, text.format(name, more))).settings}.get("loss")
        for more in ("", "cut_cross_entropy: false\n")
    ]
    assert losses == ["chunked", None]


def test_unknown_key_is_refused_with_the_nearest() -> None:
    imported = import_config(CONFIGS / "axolotl/liger_unknown.yml")
    notes = {entry.key: entry.note for entry in imported.of("unknown")}
    assert "Did you mean lora_r?" in str(notes["lora_rank"])
    assert "Did you mean sequence_len?" in str(notes["sequence_length"])


def test_value_of_the_wrong_type_is_refused_by_key(tmp_path: Path) -> None:
    file = write(
        tmp_path, "base_model: gpt2\nsequence_len: long\nmicro_batch_size: 1\nbf16: true\nlearning_rate: 1e-4\n"
    )
    imported = import_config(file)
    assert [one.message for one in imported.open_for_estimate] == ["sequence_len is long, but it takes a whole number."]


@pytest.mark.parametrize(
    ("line", "targets"),
    [
        ("[q_proj, v_proj]", ("q_proj", "v_proj")),
        ("all-linear", "all-linear"),
        ("'q_proj,v_proj'", None),
        ("'.*(q|v)_proj'", None),
    ],
)
def test_one_text_of_targets_is_a_pattern_to_peft(tmp_path: Path, line: str, targets: object) -> None:
    text = f"model_name_or_path: gpt2\nuse_peft: true\ndtype: bfloat16\nlora_target_modules: {line}\n"
    imported = import_config(write(tmp_path, text))
    assert {one.field: one.value for one in imported.settings}.get("lora.targets") == targets
    assert ("lora.targets" in open_points(imported)) == (targets is None)


@pytest.mark.parametrize(
    ("text", "value"), [("010", 8), ("'8'", 8), ("8.0", 8), ("1_000", 1000), ("1e1", None), ("8.5", None)]
)
def test_whole_numbers_are_those_of_trls_parser(tmp_path: Path, text: str, value: int | None) -> None:
    file = write(tmp_path, f"model_name_or_path: gpt2\nuse_peft: false\nper_device_train_batch_size: {text}\n")
    imported = import_config(file)
    found = {one.field: one.value for one in imported.settings if one.place is not None}
    assert found.get("batch.micro_batch_size") == value
    assert bool(imported.of("refused")) == (value is None)


def test_secrets_are_not_shown() -> None:
    entries = {entry.key: entry.value for entry in import_config(CONFIGS / "llama_factory/freeze.yaml").entries}
    assert entries["hub_token"] == "(not shown)"


def test_mixed_precision_is_priced_as_it_is_held() -> None:
    imported = import_config(CONFIGS / "trl/full_default.yaml")
    config = build_imported(imported, "estimate").config
    assert (config.precision.dtype, imported.stack.autocast) == ("fp32", "bf16")


def test_yaml_is_read_as_pyyaml_reads_it() -> None:
    text = (
        "a: yes\nb: 010\nc: 1e-4\nd: 1.0e-4\ne: 1_000\nf: 12:30:45\ng: 'yes'\nh: 0x1F\ni: off\nj: 1.5e3\nk: -\nl: .5\n"
    )
    root = read_document(text.replace("k: -", "k: '-'"), "t", plain=read_yaml11).root
    assert root is not None
    assert root.plain() == {
        "a": True, "b": 8, "c": "1e-4", "d": 1e-4, "e": 1000, "f": 45045, "g": "yes", "h": 31, "i": False, "j": "1.5e3",
        "k": "-", "l": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("colour: red\nsize: 3\n", "no key of it tells"),
        ("model: {id: gpt2}\nprecision: {dtype: bf16}\n", "foretune's own configuration"),
        ("model_name_or_path: gpt2\nlearning_rate: 1e-4\nmax_steps: 3\n", "cannot be told"),
        ("- a\n- b\n", "not a mapping"),
        ("base_model: &a gpt2\nsequence_len: 3\nmicro_batch_size: 1\n", "anchors"),
        ("base_model: gpt2\nbase_model: gpt2\nsequence_len: 3\nmicro_batch_size: 1\n", "stands twice"),
        ("", "empty"),
        ("trl sft --model_name_or_path 'gpt2\n", "quote"),
        ("llamafactory-cli train examples/x.yaml --lora_rank 8\n", "which is not read with it"),
    ],
)
def test_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        import_config(write(tmp_path, text))


def test_older_recipe_is_to_be_made_again(tmp_path: Path) -> None:
    text = "model_id: gpt2\nmethod: lora\nseq_len: 128\nmicro_batch_size: 1\nbase_dtype: bf16\nsave_steps: 100\n"
    with pytest.raises(ConfigError, match=r"before 0\.4"):
        import_config(write(tmp_path, text))


def test_named_tool_reads_what_cannot_be_told(tmp_path: Path) -> None:
    file = write(tmp_path, "model_name_or_path: gpt2\nlearning_rate: 1e-4\nmax_steps: 3\n")
    assert import_config(file, tool="trl").tool == "trl"
    with pytest.raises(ConfigError, match="no tool"):
        import_config(file, tool="unsloth")


def test_command_is_read_with_any_line_ends(tmp_path: Path) -> None:
    lines = [
        "FORCE_TORCHRUN=1 llamafactory-cli train \\",
        "  --stage sft --model_name_or_path gpt2 --bf16 \\",
        "  --lora_rank=4",
    ]
    file = tmp_path / "run.sh"
    file.write_bytes("\r\n".join(lines).encode())
    imported = import_config(file)
    assert imported.tool == "llama-factory"
    assert {one.field: one.place for one in imported.settings}["lora.rank"] == f"{file}:3:3"


@pytest.mark.parametrize(
    "launcher",
    [
        "accelerate launch --num_processes 1 --mixed_precision bf16 trl/scripts/sft.py",
        "torchrun --standalone --nproc_per_node=1 -m trl.scripts.sft",
        "python examples/scripts/sft.py",
    ],
)
def test_one_process_may_be_launched_in_any_way(tmp_path: Path, launcher: str) -> None:
    options = "--model_name_or_path gpt2 --dtype bfloat16 --gradient_checkpointing_kwargs '{\"use_reentrant\": true}'"
    imported = import_config(write(tmp_path, f"{launcher} {options}\n", "run.sh"))
    assert imported.tool == "trl"
    assert imported.open_for_estimate == ()
    assert imported.stack.checkpoint_form == "reentrant"


@pytest.mark.parametrize("devices", ["0", "0,1"])
def test_several_visible_cards_are_several_processes(tmp_path: Path, devices: str) -> None:
    file = write(
        tmp_path, f"CUDA_VISIBLE_DEVICES={devices} trl sft --model_name_or_path gpt2 --dtype bfloat16\n", "run.sh"
    )
    keys = {key for one in import_config(file).open_for_estimate for key in one.keys}
    assert ("env.CUDA_VISIBLE_DEVICES" in keys) == ("," in devices)


def test_paths_of_a_recipe_are_relative_to_it(tmp_path: Path) -> None:
    text = (CONFIGS / "canifinetune/qlora.yaml").read_text()
    config = import_config(write(tmp_path, text)).config
    assert config is not None
    assert config.data.train == str(tmp_path / "data/sample.jsonl")
    assert config.output == str(tmp_path / "output")


@pytest.mark.parametrize("tool", TOOLS)
def test_fields_of_a_table_are_fields_of_ours(tool: str) -> None:
    fields = {field for row in TOOLS[tool].keys.values() for field in row.fields}
    assert all(find_field(field) is not None for field in fields)


def test_who_opens_a_url_is_not_shown(tmp_path: Path) -> None:
    keys = "model_name_or_path: gpt2\nuse_peft: true\nmax_length: 64\n"
    file = write(tmp_path, f"{keys}dataset_name: https://me:word@host/rows.jsonl\n")
    values = {entry.key: entry.value for entry in import_config(file).entries}
    assert values["dataset_name"] == "https://(not shown)@host/rows.jsonl"


def test_a_switch_that_begins_with_no_is_itself(tmp_path: Path) -> None:
    file = write(tmp_path, "trl sft --model_name_or_path gpt2 --no_cuda --no_gradient_checkpointing\n", "run.txt")
    settings = {one.field: one.value for one in import_config(file).settings}
    assert (settings["device"], settings["gradient_checkpointing"]) == ("cpu", False)


def test_variables_of_the_environment_are_named_and_never_shown(call, tmp_path: Path) -> None:
    told = "wandb-7f3a"
    keys = "model_name_or_path: gpt2\nuse_peft: true\nmax_length: 64\n"
    yaml = write(tmp_path, f"{keys}env: {{WANDB_API_KEY: {told}, HF_TOKEN: {told}}}\n")
    line = write(tmp_path, f"WANDB_API_KEY={told} trl sft --model_name_or_path gpt2 --HUB_TOKEN {told}\n", "run.txt")
    for file in (yaml, line):
        for form in ((), ("--json",)):
            called = call("config", "import", str(file), *form)
            assert "WANDB_API_KEY" in called.out
            assert told not in called.out + called.err
