"""Bars, tables and files: well-formed, true to their figures, harmless whatever they are fed."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures.reading import SVG, bars, parts, require_harmless

from foretune.pictures import (
    COLORS,
    STACKED,
    Html,
    Mark,
    Part,
    card,
    figures_table,
    folded,
    framed,
    label,
    legend,
    memory_bar,
    paragraph,
)
from foretune.texts import escape, text_of
from foretune.traces import COMPONENT_ORDER
from foretune.units import GIB

EVIL = "</title><script>alert(1)</script>\"'&\x1b[2J\u202e\ud800 onload=x"


def test_widths_are_the_bytes_on_one_scale() -> None:
    shown = [Part("weights", 6 * GIB), Part("activations", 2 * GIB), Part("context", 1 * GIB)]
    (bar,) = bars(memory_bar(shown, title="t", description="d", marks=(Mark("card", 12 * GIB),)))
    assert parts(bar) == pytest.approx({"weights": 500, "activations": 1000 / 6, "context": 1000 / 12}, abs=0.01)
    lefts = [float(rect.attrib["x"]) for rect in bar.iter(f"{SVG}rect")][1:]
    assert lefts == pytest.approx([0, 500, 500 + 1000 / 6], abs=0.01)
    (line,) = bar.iter(f"{SVG}line")
    assert float(line.attrib["x1"]) == 999


def test_the_interval_and_a_given_end_are_drawn_to_scale() -> None:
    text = memory_bar([Part("measured", 4)], title="t", description="d", interval=(3, 6), top_bytes=8)
    lines = [(float(line.attrib["x1"]), float(line.attrib["x2"])) for line in bars(text)[0].iter(f"{SVG}line")]
    assert lines == [(375, 750), (375, 375), (750, 750)]


@given(
    st.lists(st.tuples(st.text(max_size=40), st.integers(0, 1 << 60)), max_size=8),
    st.text(max_size=60),
    st.lists(st.integers(0, 1 << 60), max_size=2),
)
def test_any_text_and_any_size_make_a_bar_that_xml_reads(
    given_parts: list[tuple[str, int]], name: str, levels: list[int]
) -> None:
    text = memory_bar(
        [Part(*part) for part in given_parts],
        title=name,
        description=name,
        marks=[Mark(name, level) for level in levels],
    )
    require_harmless(card(name, paragraph(name), legend([Part(*part) for part in given_parts]), text))
    widths = parts(bars(text)[0]).values()
    assert all(0 <= width <= 1000 for width in widths)
    assert "nan" not in text.lower().replace(text_of(name).lower(), "")


def test_hostile_text_is_text_everywhere() -> None:
    pieces = [
        paragraph(EVIL),
        legend([Part(EVIL, 1)]),
        figures_table(EVIL, (EVIL,), [(EVIL, EVIL)]),
        folded(EVIL, paragraph(EVIL)),
        memory_bar([Part(EVIL, 1)], title=EVIL, description=EVIL, marks=(Mark(EVIL, 1),)),
    ]
    text = card(EVIL, *pieces)
    page = require_harmless(text)
    assert "<script>alert(1)</script>" in page.text
    assert not any(character in text for character in ("\x1b", "\u202e", "\ud800"))
    ET.fromstring(framed(label(1, 2, EVIL), width=10, height=10, title=EVIL, description=EVIL))


def test_a_table_names_its_columns_and_rows() -> None:
    page = require_harmless(figures_table("c", ("phase", "bytes"), [("load", "1"), ("save", Html("<div>x</div>"))]))
    scopes = [attributes.get("scope") for tag, attributes in page.elements if tag == "th"]
    assert scopes == ["col", "col", "row", "row"]
    assert "x" in page.text


def test_every_component_has_a_colour_and_a_place() -> None:
    assert set(STACKED) == set(COLORS) == set(COMPONENT_ORDER[:-1])


@given(st.text())
def test_escaped_text_is_printable_and_plain_text_stays(text: str) -> None:
    shown = escape(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable()
