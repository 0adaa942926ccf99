"""`foretune data check` and `estimate --data`: what is said of rows, in text, JSON and as a picture."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data.made import TEMPLATES, made_tokenizer

from foretune.api import rows
from foretune.cli import progress
from foretune.runtime import preparation

ROWS = [
    {"instruction": "Where is it?", "output": "Over there, on the left."},
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi \x1b[2J there."}]},
    {"messages": [{"role": "user", "content": "Say <|im_end|>"}, {"role": "assistant", "content": " <|im_end|> "}]},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with rows, and a tokenizer in `tokenizer`; it is the current one."""
    made_tokenizer("words").save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATES["trims"])
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def check(call, folder: Path) -> Callable[..., Any]:
    def run(*words: str, **more: Any) -> Any:
        return call("data", "check", "rows.jsonl", "--model", "tokenizer", "--workers", "1", *words, **more)

    return run


def test_text_says_what_is_learnt_and_what_to_know(check) -> None:
    called = check("--supervision", "assistant_only")
    assert (called.code, called.err) == (0, "")
    lines = called.out
    assert "3 rows: 1 instruction, 2 conversations; 1 blank line, 0 rows dropped." in lines
    assert "data.supervision is assistant_only, the answers alone." in " ".join(lines.split())
    assert "- 1 row of which the chat template changes white space" in lines
    assert "- 1 instruction row in foretune's own form (### Instruction: ...), not in the" in lines
    assert "- 1 row whose own text holds what the tokenizer takes for control tokens." in lines
    assert "loss  Over there, on the left.</s>" in lines
    assert "loss  Hi \\x1b[2J there.<|im_end|>" in lines
    assert "\x1b" not in lines
    assert max(map(len, lines.splitlines())) <= 80


def test_colour_repeats_what_a_word_says(check) -> None:
    called = check("--supervision", "assistant_only", "--color", "always")
    assert "\x1b[32mOver there, on the left.</s>\x1b[0m" in called.out
    assert "  loss  \x1b[32m" in called.out


def test_json_has_the_statistics_and_with_rows_every_row(check) -> None:
    document = check("--json", "--rows", "--supervision", "assistant_only").document
    assert document["schema"] == "foretune.data.check/1"
    stats = document["stats"]
    assert (stats["num_rows"], stats["dropped_rows"], stats["num_blank_lines"]) == (3, 0, 1)
    first = document["rows"][0]
    assert set(first) == {"line", "text", "ids", "labels", "supervised"}
    assert first["supervised"] == ["Over there, on the left.</s>"]
    assert [label for label in first["labels"] if label >= 0] == first["ids"][
        -len([1 for x in first["labels"] if x >= 0]) :
    ]
    assert sum(label >= 0 for row in document["rows"] for label in row["labels"]) == stats["num_supervised_tokens"]
    assert "rows" not in check("--json").document


def test_all_tokens_carry_loss_unless_asked_otherwise(check) -> None:
    for row in check("--json", "--rows").document["rows"]:
        assert row["labels"] == row["ids"]


def test_a_preview_is_as_long_as_asked(check) -> None:
    for number in (0, 1, 3):
        assert check("--preview", str(number)).out.count("\nLine ") == number


def test_hashes_are_the_same_again_from_the_cache_and_with_other_workers(check) -> None:
    found = [check("--json", *words).document for words in ((), (), ("--no-cache",), ("--workers", "2", "--no-cache"))]
    assert [each["was_cached"] for each in found] == [False, True, False, False]
    assert len({(each["stats"]["sha256"], each["order_sha256"]) for each in found}) == 1
    assert len({json.dumps(each["stats"]) for each in found}) == 1


def test_the_cache_goes_by_content_and_settings(check, folder: Path) -> None:
    assert [
        check("--json", "--supervision", name).document["was_cached"] for name in ("all_tokens", "assistant_only")
    ] == [
        False,
        False,
    ]
    assert check("--json", "--seq-len", "900").document["was_cached"]
    with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps(ROWS[0]) + "\n")
    assert check("--json").document["stats"]["num_rows"] == 4
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATES["markup"])
    assert not check("--json").document["was_cached"]


def test_a_cache_that_cannot_be_written_is_done_without(check, folder: Path) -> None:
    (folder / "taken").write_text("a file")
    called = check("--json", env={"FORETUNE_CACHE": str(folder / "taken")})
    assert (called.code, called.document["was_cached"]) == (0, False)


def test_order_follows_the_seed_and_the_batch(check) -> None:
    orders = [
        check("--json", "--set", f"seed={seed}", "--micro-batch", size).document["order_sha256"]
        for seed, size in ((0, "1"), (1, "1"), (0, "2"), (0, "1"))
    ]
    assert orders[0] == orders[3]
    assert len(set(orders)) == 3


def test_a_configuration_names_the_rows_and_limits_their_length(call, folder: Path) -> None:
    (folder / "run.yaml").write_text(
        "model: {id: ./tokenizer}\nprecision: {dtype: bf16}\ndata: {train: rows.jsonl}\nbatch: {sequence_length: 8}\n"
    )
    called = call("data", "check", "--config", "run.yaml", "--json", "--workers", "1")
    assert called.code == 5
    assert "more than batch.sequence_length, 8" in called.document["error"]["message"]
    called = call("data", "check", "--config", "run.yaml", "--json", "--workers", "1", "--seq-len", "500")
    assert called.document["sequence_length"] == 500


def test_all_rows_that_are_too_long_are_named(check) -> None:
    called = check("--seq-len", "12")
    assert called.code == 5
    assert called.err.count("more than batch.sequence_length, 12") >= 2
    assert "rows.jsonl:1" in called.err


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("data", "check", "rows.jsonl"), 2, "No model is named"),
        (("data", "check", "--model", "tokenizer"), 2, "No file of rows is named"),
        (("data", "check", "none.jsonl", "--model", "tokenizer"), 5, "The file does not exist"),
        (("data", "check", "rows.jsonl", "--model", "./nothing"), 2, "with a tokenizer.json."),
        (("data", "check", "rows.jsonl", "--model", "."), 2, "has no tokenizer.json"),
        (("data", "check", "rows.jsonl", "--model", "gpt2", "--offline"), 4, "The tokenizer of openai-community/gpt2"),
        (("data", "check", "rows.jsonl", "--model", "tokenizer", "--spans", "guess"), 2, "data.spans"),
        (("data", "check", "rows.jsonl", "--model", "tokenizer", "--spans", "template"), 2, "data.spans is template"),
        (("data", "check", "rows.jsonl", "--model", "tokenizer", "--template-date", "soon"), 2, "no day"),
        (("data", "check", "rows.jsonl", "--model", "tokenizer", "--chat-template", "no.jinja"), 2, "does not exist"),
        (("data", "check", "rows.jsonl", "--model", "tokenizer", "--plot", "a.png"), 2, "The plot is an SVG"),
        (("data", "check", "rows.jsonl", "--model", "tokenizer", "--seq-len", "0"), 2, "batch.sequence_length"),
        (
            ("data", "check", "rows.jsonl", "--model", "tokenizer", "--set", "data.response_template=x"),
            2,
            "response_temp",
        ),
        (
            ("estimate", "--model", "gpt2", "--data", "rows.jsonl", "--lengths", "x", "--offline"),
            2,
            "--lengths and --data",
        ),
    ],
)
def test_a_wrong_call_is_told_what_to_do(call, folder: Path, words: tuple[str, ...], code: int, why: str) -> None:
    called = call(*words)
    assert called.code == code, called.err
    assert why in called.err
    assert "hint:" in called.err


def test_the_picture_shows_every_row(check, folder: Path) -> None:
    called = check("--plot", "lengths.svg", "--seq-len", "100")
    assert called.code == 0
    root = ET.fromstring((folder / "lengths.svg").read_text())
    tips = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    counted = [int(tip.rpartition(": ")[2].split()[0]) for tip in tips if tip.endswith(" rows") and " to " in tip]
    assert sum(counted) == 3
    assert check("--plot", "lengths.svg").code == 2


def test_an_estimate_plans_with_the_lengths_of_rows(call, folder: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 500,
        "architectures": ["LlamaForCausalLM"],
    }
    (folder / "tokenizer" / "config.json").write_text(json.dumps(config))
    called = call("estimate", "--model", "./tokenizer", "--data", "rows.jsonl", "--vram", "8", "--json")
    assert called.code == 0, called.err
    found = called.document["lengths"]
    checked = call("data", "check", "rows.jsonl", "--model", "./tokenizer", "--json", "--workers", "1").document
    assert found["data"] == checked["stats"]["lengths"]
    assert [need["rows"] for need in found["needs"]] == ["p50", "p95", "longest", "worst micro batch", "packed"]


def test_progress_is_shown_on_a_terminal_and_goes_again(check) -> None:
    called = check("--preview", "0", terminal=True)
    assert "3 rows, 100% of the file" in called.err
    assert called.err.endswith("\r\x1b[K")


def test_progress_elsewhere_is_a_line_now_and_then(check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_OF_SILENCE", 0.0)
    called = check("--preview", "0")
    assert called.err == "3 rows, 100% of the file\n"


def test_a_line_feed_and_a_backslash_are_told_apart(check, folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"instruction": "a", "output": "literal \\\\n and\\nreal"}\n')
    assert "loss  literal \\\\n and\\nreal</s>" in check("--supervision", "assistant_only").out


def test_answers_that_lose_a_token_to_the_prompt_are_counted(check, folder: Path) -> None:
    rows = [("Is it good?", "answer: yes"), ("Is it bad?", "answer: no")]
    (folder / "rows.jsonl").write_text("".join(f"{conversation(*row)}\n" for row in rows))
    (folder / "spaced.jinja").write_text("{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '</s>' }}{% endfor %}")
    found = check("--supervision", "assistant_only", "--chat-template", "spaced.jinja")
    assert "2 rows of which a token at the beginning or end of an answer is not learnt" in found.out
    assert check("--json").document["stats"]["straddled_rows"] == 0


def conversation(question: str, answer: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})


def test_a_template_that_never_ends_is_waited_for_once(check, folder: Path) -> None:
    (folder / "rows.jsonl").write_text(f"{conversation('a', 'b')}\n" * 5)
    (folder / "endless.jinja").write_text(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    found = check("--chat-template", "endless.jinja", "--json", env={"FORETUNE_RENDER_SECONDS": "1"})
    assert found.code == 5
    assert len(found.document["error"]["problems"]) == 1


def test_a_template_of_chance_is_told_as_such(check, folder: Path) -> None:
    (folder / "rows.jsonl").write_text(f"{conversation('a', 'b')}\n")
    (folder / "chance.jinja").write_text("{{ range(10**4) | random }}" + TEMPLATES["markup"])
    found = check("--chat-template", "chance.jinja")
    assert "writes the row otherwise each time" in found.err


def test_an_empty_template_is_refused(check, folder: Path) -> None:
    (folder / "empty.jinja").write_text(" \n")
    assert "The chat template is empty" in check("--chat-template", "empty.jinja").err


def test_another_template_and_other_libraries_are_another_entry_of_the_cache(
    check, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "other.jinja").write_text("{{ bos_token }}" + TEMPLATES["markup"])
    first, other = check("--json").document, check("--json", "--chat-template", "other.jinja").document
    assert not other["was_cached"]
    assert first["stats"]["sha256"] != other["stats"]["sha256"]
    assert check("--json").document["was_cached"]
    monkeypatch.setattr(rows, "require_text_libraries", lambda: {"transformers": "6.0"})
    assert not check("--json").document["was_cached"]


def test_a_day_is_part_of_the_key_where_a_template_asks_for_it(check, folder: Path) -> None:
    days = ("--template-date", "2026-01-31"), ("--template-date", "2026-02-01")
    assert [check("--json", *day).document["was_cached"] for day in days] == [False, True]
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATES["dated"])
    found = [check("--json", *day).document for day in (*days, *days)]
    assert [each["was_cached"] for each in found] == [False, False, True, True]
    assert [each["template_date"] for each in found[:2]] == ["2026-01-31", "2026-02-01"]
    assert found[0]["stats"]["sha256"] != found[1]["stats"]["sha256"]


def test_a_file_that_changes_while_it_is_read_is_told_and_not_kept(
    check, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, text = preparation.encode_file, (folder / "rows.jsonl").read_text()

    def changing(*words: Any, **named: Any) -> Any:
        (folder / "rows.jsonl").write_text(text.replace("Over there", "Over here"))
        yield from encode(*words, **named)

    monkeypatch.setattr(preparation, "encode_file", changing)
    found = check("--json")
    assert found.code == 5
    assert "changed while it was read" in found.document["error"]["message"]
    monkeypatch.undo()
    (folder / "rows.jsonl").write_text(text)
    monkeypatch.chdir(folder)
    assert "Over there" in check("--json", "--rows", "--no-cache").document["rows"][0]["text"]


def test_the_name_of_a_tokenizer_is_not_kept_with_the_rows(check, folder: Path, call) -> None:
    (folder / "tokenizer").rename(folder / "one")
    for name in ("one", "two"):
        found = call("data", "check", "rows.jsonl", "--model", name, "--json", "--workers", "1").document
        assert found["model"].endswith(name)
        assert "one" not in found["tokenizer"]
        if name == "one":
            (folder / "one").rename(folder / "two")
    assert found["was_cached"]
