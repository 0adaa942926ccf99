"""Short models of every type allocate what they allocated when golden/fingerprints.jsonl was made."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory.runs import GOLDEN, golden
from torch import Tensor, nn

from foretune.models import list_models, resolve_config, resolve_model, shape_from_config
from foretune.runtime.libraries import installed_versions
from foretune.runtime.trace.fingerprint import (
    Fingerprint,
    Line,
    Way,
    decode,
    encode,
    first_difference,
    stored,
    take,
    take_again,
)

MADE_WITH, *ROWS = golden("fingerprints.jsonl")
BY_TYPE: dict[str, dict[str, Any]] = {row["model_type"]: row for row in ROWS}
QUICK = [
    *("llama", "qwen3", "gpt2", "falcon", "bloom", "gemma2", "gemma3_text", "phi3", "mixtral", "lfm2", "deepseek_v3"),
    *("opt", "internlm2", "kimi_k25"),
]
LATER = [model_type for model_type in BY_TYPE if model_type not in QUICK]
TRACED = [row for row in ROWS if "refusal" not in row]


def compare(model_type: str) -> None:
    row = BY_TYPE[model_type]
    moved = first_difference(stored(row), take_again(row))
    assert moved is None, f"{model_type}: {moved}\nmade with {MADE_WITH['versions']}, here are {installed_versions()}"


@pytest.mark.parametrize("model_type", QUICK)
def test_a_type_has_its_fingerprint(model_type: str) -> None:
    compare(model_type)


@pytest.mark.full
@pytest.mark.parametrize("model_type", LATER)
def test_every_other_type_has_its_fingerprint(model_type: str) -> None:
    compare(model_type)


# -- the rows -----------------------------------------------------------------------------------------------------


def test_every_type_of_the_catalogue_has_a_row() -> None:
    assert {entry.model_type for entry in list_models()} == set(BY_TYPE)


@pytest.mark.parametrize("row", TRACED, ids=lambda row: row["model_type"])
def test_a_short_model_has_the_widths_and_every_kind_of_layer_of_the_whole_one(row: dict[str, Any]) -> None:
    short = shape_from_config(row["config"], id="short", source="file")
    whole = resolve_model(row["model"], offline=True)
    assert short.num_layers <= 5 < whole.num_layers
    assert {kind.parameters for kind in short.kinds} == {kind.parameters for kind in whole.kinds}
    outside = [{p.name: p.shape for p in (*shape.before, *shape.after)} for shape in (short, whole)]
    assert list(outside[0]) == list(outside[1])
    # Gemma 4's tables for all layers together are as wide as there are layers.
    assert all("per_layer" in name for name in outside[0] if outside[0][name] != outside[1][name])
    for name in ("sliding_layers", "rotary_layers"):
        assert set(getattr(short.traits, name)) == set(getattr(whole.traits, name))


def test_a_row_says_how_it_was_made() -> None:
    assert set(MADE_WITH["versions"]) == {"python", "torch", "transformers", "peft"}
    assert all(version[:1].isdigit() for version in MADE_WITH["versions"].values())


def test_a_refusal_holds_no_words_of_a_library() -> None:
    refusals = [row["refusal"] for row in ROWS if "refusal" in row]
    assert refusals
    assert not [text for text in refusals if "site-packages" in text or ".py" in text or "class '" in text]


# -- the text form ------------------------------------------------------------------------------------------------


@st.composite
def lines(draw: st.DrawFn) -> tuple[Line, ...]:
    """Any program: births, and frees of what is alive."""
    alive: list[int] = []
    made: list[Line] = []
    births: list[Line] = []
    for _ in range(draw(st.integers(0, 30))):
        phase = draw(st.sampled_from(["load", "forward", "backward"]))
        if alive and draw(st.booleans()):
            number = alive.pop(draw(st.integers(0, len(alive) - 1)))
            made.append(Line(phase, births[number].name, births[number].num_bytes, number))
        else:
            alive.append(len(births))
            births.append(Line(phase, draw(st.sampled_from(["a.weight", "aten.mm"])), draw(st.integers(1, 9)), None))
            made.append(births[-1])
    return tuple(made)


@given(lines())
def test_what_is_written_is_read(made: tuple[Line, ...]) -> None:
    assert decode(json.loads(json.dumps(encode(made)))) == made


@pytest.mark.parametrize("row", TRACED, ids=lambda row: row["model_type"])
def test_a_row_that_is_read_is_written_the_same(row: dict[str, Any]) -> None:
    made = decode(row)
    again = encode(made)
    assert again == {key: row[key] for key in again}
    freed = [line.freed for line in made if line.freed is not None]
    assert len(set(freed)) == len(freed) > 100


# -- the first difference -----------------------------------------------------------------------------------------

LLAMA = decode(BY_TYPE["llama"])
PRODUCT = next(i for i, line in enumerate(LLAMA) if line.phase == "forward" and line.name == "aten.mm.default")
FREE = next(i for i, line in enumerate(LLAMA) if line.phase == "backward" and line.freed is not None)


def difference(changed: tuple[Line, ...]) -> str | None:
    return first_difference(Fingerprint(LLAMA), Fingerprint(changed))


def test_what_is_the_same_has_no_difference() -> None:
    assert difference(tuple(LLAMA)) is None


def test_another_size_is_named() -> None:
    line = LLAMA[PRODUCT]
    changed = line._replace(num_bytes=line.num_bytes + 512)
    said = difference((*LLAMA[:PRODUCT], changed, *LLAMA[PRODUCT + 1 :]))
    expected = f"forward: expected aten.mm.default {line.num_bytes:,} bytes, got aten.mm.default {changed.num_bytes:,}"
    assert said == f"{expected} bytes (line {PRODUCT + 1:,} of {len(LLAMA):,})"


def test_another_operator_is_named() -> None:
    changed = LLAMA[PRODUCT]._replace(name="aten.addmm.default")
    said = difference((*LLAMA[:PRODUCT], changed, *LLAMA[PRODUCT + 1 :]))
    assert said is not None
    assert said.startswith("forward: expected aten.mm.default ")
    assert ", got aten.addmm.default " in said


def test_a_free_that_comes_later_is_named() -> None:
    line = LLAMA[FREE]
    said = difference((*LLAMA[:FREE], *LLAMA[FREE + 1 :], line))
    what = f"the free of allocation {line.freed:,} ({line.name} {line.num_bytes:,} bytes)"
    assert said is not None
    assert said.startswith(f"backward: expected {what}, got {LLAMA[FREE + 1]}")


def test_a_free_of_another_of_the_same_size_is_named() -> None:
    line = LLAMA[FREE]
    assert line.freed is not None
    said = difference((*LLAMA[:FREE], line._replace(freed=line.freed - 1), *LLAMA[FREE + 1 :]))
    assert said is not None
    assert f"got the free of allocation {line.freed - 1:,} (" in said


@pytest.mark.parametrize("num_missing", [1, 50])
def test_a_missing_tail_is_named(num_missing: int) -> None:
    place = f"(line {len(LLAMA) - num_missing + 1:,} of {len(LLAMA):,})"
    said = difference(LLAMA[:-num_missing])
    assert said == f"optimizer: expected {LLAMA[-num_missing]}, got the end {place}"


def test_a_tail_too_many_is_named() -> None:
    extra = Line("optimizer", "aten.zeros.default", 4, None)
    said = difference((*LLAMA, extra))
    assert said == (
        f"optimizer: expected the end, got aten.zeros.default 4 bytes (line {len(LLAMA) + 1:,} of {len(LLAMA):,})"
    )


def test_another_phase_is_named() -> None:
    said = difference((*LLAMA[:PRODUCT], LLAMA[PRODUCT]._replace(phase="loss"), *LLAMA[PRODUCT + 1 :]))
    assert said is not None
    assert " bytes in loss (line " in said


def test_refusals_that_come_go_or_change_are_named() -> None:
    refused = Fingerprint((), "there is no class for it.")
    assert first_difference(refused, refused) is None
    assert first_difference(refused, Fingerprint(LLAMA)) == (
        "it was refused, and is traced now; the refusal was: there is no class for it."
    )
    assert first_difference(Fingerprint(LLAMA), refused) == (
        "it was traced, and is refused now: there is no class for it."
    )
    changed = first_difference(refused, Fingerprint((), "another"))
    assert changed == "expected the refusal: there is no class for it. Got: another"


# -- a library that moves -----------------------------------------------------------------------------------------


def retain_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a layer of Transformers keep one tensor more."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    original, kept = LlamaMLP.forward, []

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        kept.append(original(self, x))
        return kept[-1]

    monkeypatch.setattr(LlamaMLP, "forward", forward)


def test_an_operator_that_retains_one_more_tensor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    retain_outputs(monkeypatch)
    row = BY_TYPE["llama"]
    got = take_again(row)
    said = first_difference(stored(row), got)
    hidden_bytes = 2 * 128 * row["config"]["hidden_size"] * 2
    assert said is not None
    assert said.startswith("forward: expected the free of allocation ")
    assert f" {hidden_bytes:,} bytes), got " in said


def test_what_is_refused_now_is_named() -> None:
    row = BY_TYPE["llama"]
    got = take(row["model"], {**row["config"], "num_attention_heads": 7}, Way(row["method"], row["attention"]))
    said = first_difference(stored(row), got)
    assert said == "it was traced, and is refused now: Transformers refuses this llama config"


# -- the script ---------------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """scripts/fingerprints.py on a copy of the file in which Llama's first forward product is another."""
    spec = importlib.util.spec_from_file_location("fingerprints", GOLDEN.parents[1] / "scripts" / "fingerprints.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    changed = LLAMA[PRODUCT]._replace(name="aten.addmm.default")
    row = {**BY_TYPE["llama"], **encode((*LLAMA[:PRODUCT], changed, *LLAMA[PRODUCT + 1 :]))}
    file = tmp_path / "fingerprints.jsonl"
    file.write_text("".join(json.dumps(item) + "\n" for item in (MADE_WITH, row, BY_TYPE["internlm2"])))
    monkeypatch.setattr(module, "FILE", file)
    return module


def test_the_script_names_type_and_first_difference(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.check([]) == 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].startswith("llama: forward: expected aten.addmm.default ")
    assert script.check(["internlm2"]) == 0


def test_the_script_writes_what_it_then_finds(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    script.write(["llama"])
    assert capsys.readouterr().out.startswith("llama: forward: expected aten.addmm.default ")
    assert script.check([]) == 0
    assert script.read_rows()["llama"] == BY_TYPE["llama"]


def test_a_model_is_cut_to_one_layer_of_each_kind(script: ModuleType) -> None:
    model = BY_TYPE["granitemoehybrid"]["model"]
    assert script.shortened(model)["layer_types"] == ["mamba", "attention"]
    assert script.shortened(model).keys() == resolve_config(model, offline=True).keys()
