"""Intervals: how they are learnt, what the table says, and how an answer comes by its own."""

import importlib.util
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory.runs import SMALL, shape_of

from foretune.api import build_config, estimate, find_device, find_stack
from foretune.evidence.intervals import Residual, interval_score, learn_range, left_out_ranges
from foretune.memory import FORETUNE, estimate_memory
from foretune.memory.interval import TABLE, error_class, error_classes, pad_bytes
from foretune.units import GIB, MIB

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("intervals_script", SCRIPTS / "intervals.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rows(errors: dict[str, list[float]], pad: float = 0.0) -> list[Residual]:
    """Errors by source/model."""
    return [
        Residual(*group.split("/"), error_percent=error, pad_percent=pad, tokens=1024, params=10**9)
        for group, found in errors.items()
        for error in found
    ]


# -- learning


def test_a_group_weighs_the_same_however_many_rows_it_has() -> None:
    many = {f"s/m{i}": [float(i)] for i in range(40)}
    found = learn_range(rows(many))
    heavy = learn_range(rows({**many, "s/m38": [38.0] * 500}))
    bare = [each.high_percent / each.scale_above for each in (heavy, found)]
    assert bare == [pytest.approx(38.0)] * 2


def test_with_few_groups_the_range_reaches_to_the_extremes_of_what_is_left_in() -> None:
    found = learn_range(rows({"s/a": [-1.0, 0.2], "s/b": [0.5, -0.9], "s/c": [0.4, 0.1], "t/a": [0.3, -0.8]}))
    assert found.low_percent <= -0.5
    assert found.high_percent >= 0.25
    assert (found.num_rows, found.num_groups) == (8, 4)


GROUPS = st.sampled_from([f"{source}/{model}" for source in "st" for model in "abcdef"])


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(GROUPS, st.lists(st.floats(-20, 20), min_size=1, max_size=4), min_size=2))
def test_zero_lies_in_every_range(errors: dict[str, list[float]]) -> None:
    found = learn_range(rows(errors))
    assert found.low_percent < 0 < found.high_percent


def test_what_the_allocators_segment_accounts_for_widens_nothing() -> None:
    errors = {f"s/m{i}": [1.5, -1.5] for i in range(6)}
    assert learn_range(rows(errors, pad=2.0)).high_percent < 0.1
    assert learn_range(rows(errors)).high_percent >= 1.0


def test_a_group_is_never_held_against_itself() -> None:
    found = rows({"s/a": [9.0], "s/b": [0.0], "s/c": [0.0]})
    ranges = {group[0].model: (low, high) for group, low, high in left_out_ranges(found, (1.0, 1.0))}
    assert ranges["a"][1] < 1
    assert ranges["b"][1] == 9.0


def test_interval_score_is_width_and_twenty_times_the_miss() -> None:
    assert interval_score(-5, 5, 0) == 10
    assert interval_score(-5, 5, 6) == pytest.approx(30)
    assert interval_score(-5, 5, -7) == pytest.approx(50)


# -- the table


def test_the_table_is_what_the_stored_predictions_give() -> None:
    made = {entry.name: entry for entry in script().table()}
    assert made == dict(error_classes())
    assert TABLE.read_bytes().endswith(b"\n")


def test_rows_that_are_left_out_are_covered_source_by_source() -> None:
    for name, by_metric in script().residuals().items():
        for metric, found in by_metric.items():
            entry = getattr(error_classes()[name], metric)
            inside: dict[str, list[bool]] = defaultdict(list)
            for group, low, high in left_out_ranges(found, (entry.scale_below, entry.scale_above)):
                for each in group:
                    inside[each.source].append(each.is_within(low, high))
            for source, shares in inside.items():
                if len(shares) >= 5:
                    assert sum(shares) / len(shares) >= 0.88, (name, metric, source)


# -- an answer's own

CONFIG = build_config({"model.id": "test/model", "lora.rank": 16}, overrides=["batch.sequence_length=512"]).config


def test_verdicts_rest_on_the_process_interval() -> None:
    shape = shape_of(SMALL)
    needed = estimate_memory(CONFIG, shape, find_device("rtx 3090"))
    assert needed.need_bytes == needed.process_interval.high_bytes
    assert needed.safety_margin_bytes == needed.reserved_interval.high_bytes - needed.reserved_bytes
    low, high = needed.process_interval.low_bytes, needed.process_interval.high_bytes
    for total, verdict in ((high, "fits"), (high - 1, "tight"), (low, "tight"), (low // 2, "does not fit")):
        card = find_device("rtx 3090").with_(total_bytes=total)
        answer = estimate(CONFIG, device=card, shape=shape, with_changes=False)
        assert answer.verdict == verdict


def test_what_is_free_now_is_the_budget() -> None:
    shape = shape_of(SMALL)
    card = find_device("rtx 3090")
    assert estimate(CONFIG, device=card, shape=shape).verdict == "fits"
    assert estimate(CONFIG, device=card.with_(free_bytes=300 * MIB), shape=shape).verdict == "does not fit"


def test_windows_is_told_that_it_spills() -> None:
    shape = shape_of(SMALL)
    card = find_device("rtx 3090").with_(free_bytes=300 * MIB, platform="windows")
    fit = estimate(CONFIG, device=card, shape=shape).fit
    assert fit is not None
    assert "spills into system memory" in fit.because


def test_an_interval_is_wider_beyond_what_was_seen() -> None:
    shape = shape_of(SMALL)
    seen = error_classes()["16-bit weights"].allocated
    length = seen.most_tokens

    def width(tokens: int) -> float:
        batch = CONFIG.batch.with_(sequence_length=tokens)
        needed = estimate_memory(CONFIG.with_(batch=batch, attention="eager"), shape, find_device("h200"))
        around = needed.allocated_interval
        pads = 2 * pad_bytes("allocated", needed.allocated_bytes)
        return (around.high_bytes - around.low_bytes - pads) / needed.allocated_bytes

    assert width(2 * length) == pytest.approx(2 * width(length), rel=0.05)
    needed = estimate_memory(CONFIG.with_(batch=CONFIG.batch.with_(sequence_length=2 * length)), shape)
    assert "more than was seen" in needed.allocated_interval.basis


def test_a_class_is_the_stack_and_the_loading_of_weights() -> None:
    quantized = build_config({"model.id": "x"}, method="qlora").config
    assert error_class(CONFIG, FORETUNE) == "16-bit weights"
    assert error_class(quantized, FORETUNE) == "nf4"
    assert error_class(quantized, find_stack("manual-loop-5.0")) == "nf4, quantized on four threads"
    assert error_class(CONFIG, FORETUNE.with_(is_nearest=True)) == "foreign stack"
    foreign = estimate_memory(CONFIG, shape_of(SMALL), stack=FORETUNE.with_(is_nearest=True))
    assert "nearest to foretune" in foreign.stack
    assert foreign.reserved_interval.high_bytes - foreign.reserved_bytes > GIB // 20
