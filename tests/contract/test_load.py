"""Files and command lines become configurations, and everything wrong is said at once."""

import os
from pathlib import Path
from typing import Any

import pytest

from foretune.contract import LoadedConfig, Override, build_config, load_config, parse_config, parse_override
from foretune.contract.scalars import BadScalar, echo, read_plain
from foretune.errors import ConfigError, UnsupportedError

BASE = "model: {id: Qwen/Qwen2.5-0.5B}\nprecision: {dtype: bf16}\n"


def refused(text: str, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, name="run.yaml", **options)
    return caught.value


def accepted(text: str, **options: Any) -> LoadedConfig:
    return parse_config(BASE + text, name="run.yaml", **options)


# --- scalars


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 0.0001), ("1E3", 1000.0), ("2.5", 2.5), (".5", 0.5), ("1.", 1.0), ("-0", 0), ("+3", 3),
        ("010", 10), ("0o10", 8), ("0x1F", 31), ("no", "no"), ("off", "off"), ("yes", "yes"), ("NO", "NO"),
        ("12:30:45", "12:30:45"), ("1_000", "1_000"), ("0b11", "0b11"), ("true", True), ("False", False),
        ("", None), ("~", None), ("null", None), ("nan", "nan"), ("inf", "inf"), ("1.2.3", "1.2.3"), ("-", "-"),
        ("<<", "<<"), ("e5", "e5"), ("0x", "0x"),
    ],
)  # fmt: skip
def test_plain_scalars_follow_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    read = read_plain(text)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    "text",
    [".nan", ".NaN", ".inf", "-.Inf", "1e999", "-1e400", "2024-01-01", "2001-12-14t21:59:43.10-05:00",
     "9223372036854775808", "9" * 5000, "0x" + "f" * 40],
)  # fmt: skip
def test_scalars_that_no_setting_can_hold_are_refused(text: str) -> None:
    with pytest.raises(BadScalar):
        read_plain(text)


def test_values_are_echoed_escaped_and_short() -> None:
    assert echo("a\x1b[31m\u202eb") == r"'a\x1b[31m\u202eb'"
    assert len(echo("x" * 10_000)) <= 80
    assert len(echo(10**300)) <= 80


# --- documents


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("", "run.yaml", "empty"),
        ("# only a comment\n", "run.yaml", "empty"),
        ("- a\n", "run.yaml:1:1", "a list, not a mapping"),
        ("hello\n", "run.yaml:1:1", "'hello', not a mapping"),
        ("a: &x 1\n", "run.yaml:1:4", "anchors"),
        ("a: *x\n", "run.yaml:1:4", "anchors"),
        ("a: &a [x]\nb: &b [*a,*a,*a]\nc: [*b,*b,*b]\n", "run.yaml:1:4", "anchors"),
        ("a: !!str 1\n", "run.yaml:1:4", "tag"),
        ("a: !!python/object/apply:os.system [id]\n", "run.yaml:1:4", "tag"),
        ("a: !x {b: 1}\n", "run.yaml:1:4", "tag"),
        ("<<: {a: 1}\n", "run.yaml:1:1", "merge"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "run.yaml:4:3", "stands twice; the first is at run.yaml:3:3"),
        ("1: a\n", "run.yaml:1:1", "a key must be text"),
        ("true: a\n", "run.yaml:1:1", "a key must be text"),
        ("? [a]\n: b\n", "run.yaml:1:3", "a key must be text"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2:1", "second document"),
        ("%YAML 1.1\n---\na: 1\n", "run.yaml:2:1", "directives"),
        ("%TAG ! tag:x,2000:\n---\na: 1\n", "run.yaml:2:1", "directives"),
        ("a: 2024-01-01\n", "run.yaml:1:4", "quotes"),
        ("a: .nan\n", "run.yaml:1:4", "finite"),
        ("a: 1e999\n", "run.yaml:1:4", "too large"),
        ("a: 99999999999999999999\n", "run.yaml:1:4", "too large"),
        ("a:\n\tb: 1\n", "run.yaml:2:1", "not with tabs"),
        ("a: b: c\n", "run.yaml:1:5", "not valid YAML"),
        ("a: 'x\n", "run.yaml:2:1", "not valid YAML"),
        ('a: "\\ud800"\n', "run.yaml:1:4", "surrogate"),
        ('a: "\\UFFFFFFFF"\n', "run.yaml", "not valid YAML"),
        ("a: \x00\n", "run.yaml:1:4", "U+0000"),
        ("a: 1\nb: \u2028\n", "run.yaml:2:4", "U+2028"),
        ("a: \x1b[31m\n", "run.yaml:1:4", "U+001B"),
        ("[" * 5000, "run.yaml:1:32", "deeper than 32"),
        ("{a: " * 5000, "run.yaml:1:125", "deeper than 32"),
        ("- " * 5000, "run.yaml:1:63", "deeper than 32"),
        ("a: [" + "b, " * 20_000 + "]", None, "10 000 values"),
    ],
)
def test_what_a_file_may_not_hold_is_refused_at_its_place(text: str, place: str | None, says: str) -> None:
    error = refused(text)
    told = [problem for problem in error.problems if says in str(problem)]
    assert told
    assert all(problem.hint for problem in error.problems)
    assert place is None or told[0].place == place


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xfe" + "a: 1".encode("utf-16-le"), "UTF-8"),
        (b"a: 1\nb: \xe9\n", "UTF-8"),
        (b"#" * (2 << 20), "larger than 1 MiB"),
        (b"", "empty"),
    ],
)
def test_bytes_that_are_no_configuration_are_refused(tmp_path: Path, data: bytes, says: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=says):
        load_config(file)


def test_a_missing_file_a_folder_and_an_impossible_name_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("a\x00b.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("x" * 10_000)


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path: Path) -> None:
    plain, windows = tmp_path / "a.yaml", tmp_path / "b.yaml"
    plain.write_text(BASE + "seed: 3\n")
    windows.write_bytes(b"\xef\xbb\xbf" + (BASE + "seed: 3\n").replace("\n", "\r\n").encode())
    assert load_config(plain).config == load_config(windows).config
    assert load_config(windows).origins["seed"].place == f"{windows}:3:1"


def test_json_is_read_strictly(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{\n\t"model": {"id": "gpt\\u0032"},\n\t"precision": {"dtype":"bf16"}, "seed": 7\n}')
    assert load_config(file).config.seed == 7
    assert load_config(file).config.model.id == "gpt2"
    file.write_text('{"model": {"id": "a"}, "model": {"id": "b"}}')
    with pytest.raises(ConfigError, match="stands twice"):
        load_config(file)
    file.write_text('{"a":' * 5000)
    with pytest.raises(ConfigError, match="deeper than 32"):
        load_config(file)


def test_a_surrogate_pair_of_json_is_one_character() -> None:
    loaded = accepted('output: "/tmp/\\ud83d\\ude00"')
    assert loaded.config.output == "/tmp/\U0001f600"


# --- keys and values


def test_an_unknown_key_is_refused_with_the_nearest_one_and_its_line() -> None:
    error = refused(BASE + "lora:\n  rankk: 8\n")
    assert str(error) == "run.yaml:4:3: lora.rankk is no setting. Did you mean lora.rank?"


def test_new_special_tokens_are_an_unknown_key() -> None:
    """case-115: adding tokens is not supported."""
    error = refused(BASE + "new_special_tokens: ['<x>']\n")
    assert "new_special_tokens is no setting" in str(error)
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("per_device_train_batch_size: 1", "batch.micro_batch_size"),
        ("learning_rate: 1e-4", "optimizer.learning_rate"),
        ("save_steps: 10", "checkpoint.every_updates"),
        ("lora.rank: 8", "Write `lora:` and below it"),
        ("method: qlora", "lora and quantization"),
        ("deepspeed: zero3.json", "parallelism (of which only single is qualified)"),
        ("load_in_4bit: true", "quantization.scheme: nf4"),
        ("zzzzzz: 1", "The top level has model, precision"),
    ],
)
def test_keys_of_other_tools_are_answered_with_ours(key: str, ours: str) -> None:
    assert ours in str(refused(BASE + key))


def test_the_dtype_is_never_inferred() -> None:
    """case-122: a file must say the dtype."""
    error = refused("model: {id: gpt2}\n")
    assert "precision.dtype is missing" in str(error)
    assert "never inferred" in str(refused("model: {id: gpt2}\nprecision: {dtype: auto}\n"))


def test_paged_adamw_32bit_is_refused_as_unqualified_with_what_is_qualified() -> None:
    """case-030: an optimizer that is not qualified gets an explicit answer."""
    with pytest.raises(UnsupportedError) as caught:
        accepted("optimizer: {name: paged_adamw_32bit}\n")
    assert "adamw, adamw_8bit, paged_adamw_8bit, sgd" in str(caught.value)
    assert "Did you mean paged_adamw_8bit?" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("seed: true", "seed is true, but it must be a whole number from 0"),
        ("seed: 2.0", "Write 2."),
        ("seed: '3'", "Write 3, without quotes"),
        ("seed: 1_000", "Write 1000, without quotes or separators"),
        ("seed: -1", "seed is -1"),
        ("seed: 4294967296", "to 4294967295"),
        ("seed: null", "seed is null"),
        ("seed: [1]", "seed is a list"),
        ("gradient_checkpointing: yes", "Write true."),
        ("gradient_checkpointing: 'no'", "Write false."),
        ("gradient_checkpointing: 1", "true or false"),
        ("batch: {micro_batch_size: 0}", "a whole number from 1"),
        ("batch: {sequence_length: 1000000000000}", "to 1073741824"),
        ("batch:", "or leave it out"),
        ("batch: 3", "must be a group of settings"),
        ("lora: true", "`null` for none"),
        ("lora: {dropout: 1.0}", "to below 1"),
        ("lora: {targets: all-liner}", "Did you mean all-linear?"),
        ("lora: {targets: q_proj}", "a list of names"),
        ("lora: {targets: []}", "a list of names"),
        ("lora: {targets: []}", "lora.targets is an empty list"),
        ("lora: {targets: [1]}", "lora.targets[0] is 1, but it must be a name."),
        ("lora: {targets: [q_prj, true]}", 'Put it in quotes if it is a name: "true".'),
        ("lora: {modules_to_save: [a, '']}", "lora.modules_to_save[1] is '', but it must be a name."),
        ("lora: {modules_to_save: [a, [b]]}", "lora.modules_to_save[1] is a list, but it must be a name."),
        ("lora: {targets: [q_prj, .nan]}", "lora.targets[1] is .nan, which is not a finite number."),
        ("evaluation: {split: 0}", "above 0 to below 1"),
        ("optimizer: {learning_rate: fast}", "optimizer.learning_rate is 'fast'"),
        ("optimizer: {learning_rate: '1e-4'}", "a number"),
        ("output: ''", "output is ''"),
        ("output: '  '", "without control characters"),
        ('output: "a\\nb"', "without control characters"),
        ("output: 3", 'Put it in quotes: "3".'),
        ("device: ''", "device is ''"),
        ("attention: flash_attn", "Did you mean flash_attention_2?"),
        ("precision: {dtype: bfloat16}", "stands twice"),
    ],
)
def test_wrong_values_are_refused_with_what_to_write(line: str, says: str) -> None:
    assert says in str(refused(BASE + line))


def test_other_spellings_of_a_dtype_are_answered_with_ours() -> None:
    assert "Did you mean bf16?" in str(refused("model: {id: m}\nprecision: {dtype: bfloat16}\n"))


def test_everything_wrong_is_reported_at_once() -> None:
    error = refused("model: {}\nprecision: {dtype: bf8}\nlora: {rnk: 3, alpha: x}\nbatch: 1\nextra: 1\n")
    assert {problem.field for problem in error.problems} == {
        "model.id", "precision.dtype", "lora.rnk", "lora.alpha", "batch", "extra",
    }  # fmt: skip


def test_what_yaml_cannot_hold_hides_no_other_problem() -> None:
    """Each line has its own fault; all are told, by line, with the field and what to do."""
    lines = (
        "precision: {dtype: bf17}",
        "lora: {alpha: .nan, rnk: 3}",
        "seed: 99999999999999999999999",
        "model: {id: a, revison: b}",
        "optimizer: {epsilon: 1e999}",
        "output: 2024-01-01",
        "data: {train: *x}",
        "batch: {sequence_length: !!int '3'}",
        "checkpoint: {keep: &k 3}",
        "evaluation: {<<: {split: 0.1}}",
        "1: x",
        "extra: [.inf]",
        "quantization:",
        "model: {idd: c}",
    )
    problems = refused("\n".join(lines)).problems
    assert [(problem.place, problem.field) for problem in problems] == [
        ("run.yaml:1:13", "precision.dtype"),
        ("run.yaml:2:15", "lora.alpha"),
        ("run.yaml:2:21", "lora.rnk"),
        ("run.yaml:3:7", "seed"),
        ("run.yaml:4:16", "model.revison"),
        ("run.yaml:5:22", "optimizer.epsilon"),
        ("run.yaml:6:9", "output"),
        ("run.yaml:7:15", "data.train"),
        ("run.yaml:8:26", "batch.sequence_length"),
        ("run.yaml:9:20", "checkpoint.keep"),
        ("run.yaml:10:14", "evaluation.<<"),
        ("run.yaml:11:1", "1"),
        ("run.yaml:12:1", "extra"),
        ("run.yaml:12:9", "extra"),
        ("run.yaml:13:1", "quantization"),
        ("run.yaml:14:1", "model"),
        ("run.yaml:14:9", "model.idd"),
    ]
    assert all(problem.hint for problem in problems)


def test_an_unreadable_value_is_answered_with_what_its_field_holds() -> None:
    error = refused(BASE + "lora: {alpha: .nan}\n")
    says = "lora.alpha is .nan, which is not a finite number. Write a number above 0 to 1e+09."
    assert str(error) == f"run.yaml:3:15: {says}"


def test_json_hides_no_other_problem_either(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"model": {"id": "a"},\n "seed": 1e999,\n "precision": {"dtype": "bf17"},\n "seed": -1}')
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert [(problem.place, problem.field) for problem in caught.value.problems] == [
        (f"{file}:3:16", "precision.dtype"), (f"{file}:4:2", "seed"), (f"{file}:4:2", "seed"),
    ]  # fmt: skip


def test_faults_before_the_end_of_the_readable_text_are_told_with_it() -> None:
    error = refused("a: 1\na: 2\nb: " + "[" * 40)
    assert [problem.place for problem in error.problems] == ["run.yaml:2:1", "run.yaml:3:34"]
    assert "two levels" in str(error.problems[1].hint)


def test_an_unreadable_value_of_the_file_that_the_command_line_replaces_is_no_problem() -> None:
    config = accepted("lora: {alpha: .nan}\n", overrides=["lora.alpha=8"]).config
    assert config.lora is not None
    assert config.lora.alpha == 8.0


@pytest.mark.parametrize("text", ["seed=.nan", "seed=1e999", "seed=2024-01-01", "lora.targets=[.inf]"])
def test_what_no_setting_can_hold_is_refused_beside_the_rest(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"model.id": "gpt2"}, overrides=[text, "optimizer.name=adam9"])
    fields = {problem.field for problem in caught.value.problems}
    assert fields == {parse_override(text).key, "optimizer.name"}


@pytest.mark.parametrize("section", ["lora", "quantization"])
@pytest.mark.parametrize("blank", ["", " # rank: 8", "\n  # rank: 8"])
@pytest.mark.parametrize("method", [None, "full", "qlora"])
def test_a_blank_section_is_asked_about_and_never_taken_as_null(section: str, blank: str, method: str | None) -> None:
    error = refused(f"{BASE}{section}:{blank}\n", method=method)
    told = [problem for problem in error.problems if "blank" in problem.message]
    assert [(problem.place, problem.field) for problem in told] == [("run.yaml:3:1", section)]
    assert told[0].hint == f"Write `{section}: null` for none, or `{section}: {{}}` for the defaults."
    assert len(error.problems) == 1


@pytest.mark.parametrize("null", ["null", "~", "Null"])
def test_a_written_null_is_none(null: str) -> None:
    config = accepted(f"lora: {null}\nquantization: {null}\n").config
    assert (config.lora, config.quantization) == (None, None)


def test_what_is_missing_stands_at_its_section_or_at_the_file() -> None:
    """A section in which something is missing has a line; a section that is missing has the file."""
    problems = refused("seed: 1\nmodel: {revision: main}\n").problems
    assert [(problem.field, problem.place) for problem in problems] == [
        ("model.id", "run.yaml:2:1"), ("precision.dtype", "run.yaml"),
    ]  # fmt: skip
    assert "--set model.id=" in str(problems[0].hint)


def test_the_wrong_names_in_a_list_are_told_at_their_own_lines() -> None:
    error = refused(BASE + "lora:\n  targets:\n    - q_prj\n    - 3\n    - ''\n")
    assert [problem.place for problem in error.problems] == ["run.yaml:6:7", "run.yaml:7:7"]


def test_a_flood_of_problems_is_cut() -> None:
    error = refused("".join(f"key{index}: 1\n" for index in range(3000)))
    assert len(error.problems) == 51
    assert "more problems" in error.problems[-1].message


def test_a_whole_number_may_stand_for_a_float() -> None:
    config = accepted("lora: {alpha: 32}\noptimizer: {learning_rate: 1e-4, momentum: -0.0}\n").config
    assert config.lora is not None
    assert repr(config.lora.alpha) == "32.0"
    assert config.optimizer.learning_rate == 1e-4
    assert repr(config.optimizer.momentum) == "0.0"


def test_norway_stays_text() -> None:
    output = accepted("output: no\n").config.output
    assert output is not None
    assert output.endswith("/no")


# --- precedence, origins, overrides


def test_the_command_line_beats_the_file_and_the_file_beats_the_default() -> None:
    loaded = accepted("seed: 3\nlora:\n  rank: 8\n", overrides=["lora.rank=32"])
    assert loaded.config.lora is not None
    assert loaded.config.lora.rank == 32
    assert str(loaded.origins["lora.rank"]) == "command line (--set lora.rank)"
    assert str(loaded.origins["seed"]) == "file (run.yaml:3:1)"
    assert str(loaded.origins["lora.alpha"]) == "default"


def test_bf16_is_the_default_of_the_command_line_only() -> None:
    loaded = build_config({"model.id": "gpt2"})
    assert loaded.config.precision.dtype == "bf16"
    assert loaded.origins["precision.dtype"].source == "command-line default"


def test_a_flag_is_named_in_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"model.id": "gpt2"}, overrides=[Override("lora.rank", 0, "--rank")])
    assert caught.value.problems[0].place == "--rank"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1), ("a=1e-4", 0.0001), ("a=true", True), ("a=null", None), ("a=no", "no"), ("a='1'", "1"),
        ('a="x y"', "x y"), ("a=[]", []), ("a=[q_proj, v_proj]", ["q_proj", "v_proj"]), ("a=['1', 2]", ["1", 2]),
        ("a=x=y", "x=y"), ("a=C:\\data # x", "C:\\data # x"), ("a={b: [1]}", {"b": [1]}), (" a = 1 ", 1),
    ],
)  # fmt: skip
def test_values_on_the_command_line_are_yaml_scalars_or_lists(text: str, value: object) -> None:
    assert parse_override(text) == Override("a", value)


@pytest.mark.parametrize("text", ["a", "=1", "a=", "a= ", "a=[", "a=&x [1]", "a=[1]]", "a='", ""])
def test_what_is_no_setting_on_the_command_line_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_override(text)


def test_a_dotted_key_creates_its_section_and_null_removes_it() -> None:
    assert accepted("", overrides=["lora.rank=8"]).config.method == "lora"
    assert accepted("lora: {rank: 8}\n", overrides=["lora=null"]).config.method == "full"
    assert accepted("lora: null\n", overrides=["lora={}"]).config.method == "lora"


def test_an_unknown_dotted_key_is_answered_with_the_nearest() -> None:
    error = refused(BASE, overrides=["lora.rnk=3", "optimiser.name=sgd"])
    assert "Did you mean lora.rank?" in str(error)
    assert "Did you mean optimizer?" in str(error)


@pytest.mark.parametrize(
    "overrides",
    [["seed=1", "seed=2"], ["lora=null", "lora.rank=8"], ["lora.rank=8", "lora=null"], ["seed=1", "seed=1.0"]],
)
def test_settings_of_one_command_line_may_not_contradict_each_other(overrides: list[str]) -> None:
    assert "contradicts" in str(refused(BASE, overrides=overrides))


def test_the_same_setting_twice_is_accepted() -> None:
    assert accepted("", overrides=["seed=1", "seed=1"]).config.seed == 1


# --- method


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_method_brings_what_it_needs(method: str) -> None:
    loaded = accepted("", method=method)
    assert loaded.config.method == method
    if method == "qlora":
        assert loaded.origins["quantization.scheme"].place == "--method"


def test_a_method_keeps_what_is_given() -> None:
    config = accepted("lora: {rank: 4}\nquantization: {scheme: int8}\n", method="qlora").config
    assert config.lora is not None
    assert config.quantization is not None
    assert (config.lora.rank, config.quantization.scheme) == (4, "int8")


@pytest.mark.parametrize(
    ("text", "method", "says"),
    [
        ("lora: {}\n", "full", "takes no section lora, but run.yaml:3:1 sets it"),
        ("lora: {}\n", "full", "Remove lora (or --set lora=null), or choose --method lora or qlora."),
        ("lora: {}\nquantization: {}\n", "lora", "takes no section quantization"),
        ("quantization: null\n", "qlora", "needs the section quantization, but run.yaml:3:1 sets it to null"),
        ("lora: null\n", "lora", "needs the section lora, but run.yaml:3:1 sets it to null"),
        ("", "qlor", "Did you mean qlora?"),
        ("", "\x1b", "must be full, lora or qlora"),
    ],
)
def test_a_method_that_contradicts_what_is_given_is_refused(text: str, method: str, says: str) -> None:
    assert says in str(refused(BASE + text, method=method))


def test_a_method_that_contradicts_a_flag_names_the_flag_to_remove() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"model.id": "gpt2"}, overrides=[Override("lora.rank", 8, "--rank")], method="full")
    assert caught.value.problems[0].hint == "Remove --rank, or choose --method lora or qlora."


# --- paths


def test_paths_of_a_file_are_relative_to_it_and_those_of_the_command_line_to_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job" / "model").mkdir(parents=True)
    (tmp_path / "shell").mkdir()
    file = tmp_path / "job" / "run.yaml"
    file.write_text(
        "model: {id: ./model}\nprecision: {dtype: bf16}\ndata: {train: d/a.jsonl}\nevaluation: {data: ../b.jsonl}\n"
    )
    monkeypatch.chdir(tmp_path / "shell")
    config = load_config("../job/run.yaml", overrides=["output=out"]).config
    assert config.model.id == str(tmp_path / "job" / "model")
    assert config.data.train == str(tmp_path / "job" / "d" / "a.jsonl")
    assert config.evaluation.data == str(tmp_path / "b.jsonl")
    assert config.output == str(tmp_path / "shell" / "out")


def test_a_model_id_is_a_path_only_where_it_looks_like_one_or_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build_config({"model.id": "Qwen/Qwen2.5-0.5B"}).config.model.id == "Qwen/Qwen2.5-0.5B"
    assert build_config({"model.id": "~/m"}).config.model.id == str(tmp_path / "m")
    (tmp_path / "local").mkdir()
    assert build_config({"model.id": "local"}).config.model.id == str(tmp_path / "local")


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "run.yaml"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_config(pipe)
