"""What a notebook and a shell show of the values: their figures, their kind, and nothing that does harm."""

from typing import Any

import pytest
from pictures.reading import Page, bars, parts, require_harmless

from foretune.api import (
    EstimateAnswer,
    MemoryEstimate,
    RunRecord,
    TraceAnswer,
    Traced,
    build_config,
    device_from_memory,
    estimate,
    find_device,
    recommend,
)
from foretune.evidence import (
    BaseIdentity,
    Check,
    CodeIdentity,
    Failure,
    Hardware,
    PhaseReading,
    ProcessIdentity,
    Scope,
)
from foretune.memory.notebook import need_parts
from foretune.units import GIB, MIB, format_bytes

EVIL = "<script>alert('x')</script>\"&\x1b[2J\u202e"


def answer(**changes: Any) -> EstimateAnswer:
    fields = {"model.id": "Qwen/Qwen2.5-0.5B", "lora.rank": 16, "batch.sequence_length": 1024, **changes}
    return estimate(build_config(fields).config, device=find_device("rtx 3060 12gb"), offline=True)


@pytest.fixture(scope="module")
def known() -> EstimateAnswer:
    return answer()


def of(known: EstimateAnswer) -> MemoryEstimate:
    assert known.estimate is not None
    return known.estimate


def shown(value: Any) -> tuple[str, Page]:
    text = value._repr_html_()
    return text, require_harmless(text)


# -- estimates


def test_the_bar_is_the_need_in_parts_and_its_end_is_the_card(known: EstimateAnswer) -> None:
    needed = of(known)
    assert known.fit is not None
    assert sum(part.num_bytes for part in need_parts(needed)) == needed.need_bytes
    (bar,) = bars(shown(known)[0])
    widths = parts(bar)
    assert sum(widths.values()) == pytest.approx(1000 * needed.need_bytes / known.fit.device.total_bytes, abs=0.1)
    sizes = {part.name: part.num_bytes for part in needed.components}
    for name in ("weights", "activations", "logits and loss"):
        assert widths[name] == pytest.approx(1000 * sizes[name] / known.fit.device.total_bytes, abs=0.01)  # type: ignore[index]


def test_figures_kind_interval_and_verdict_are_written(known: EstimateAnswer) -> None:
    needed, (_, page) = of(known), shown(known)
    assert known.fit is not None
    for number in (needed.need_bytes, needed.allocated_bytes, needed.reserved_bytes, known.fit.budget_bytes):
        assert format_bytes(number) in page.text
    for part in needed.components:
        assert not part.num_bytes or f"{part.num_bytes:,}" in page.text
    low = format_bytes(needed.process_interval.low_bytes).split()[0]
    assert f"90 %: {low} to {format_bytes(needed.process_interval.high_bytes)}" in page.text
    assert "(estimated" in page.text
    assert page.text.startswith("Qwen/Qwen2.5-0.5B: lora, bf16, 1 x 1,024 tokens Fits: needs")
    assert [tag for tag, _ in page.elements].count("table") == 2


def test_what_is_free_and_what_the_card_has_are_told_apart(known: EstimateAnswer) -> None:
    config = known.config
    text, page = shown(estimate(config, device=device_from_memory(24 * GIB, 5 * GIB), offline=True))
    assert "5.00 GiB free now" in page.text
    assert "stroke-dasharray" in text


def test_without_a_device_the_need_alone_is_shown(known: EstimateAnswer) -> None:
    text, page = shown(of(known))
    assert "Needs " in page.text
    assert sum(parts(bars(text)[0]).values()) == pytest.approx(1000, abs=0.1)


def test_a_traced_answer_says_so(known: EstimateAnswer) -> None:
    traced = known.with_(estimate=of(known).with_(kind="traced"))
    assert "(traced" in shown(traced)[1].text
    assert "(estimated" not in shown(traced)[1].text


def test_a_trace_with_its_program_is_shown_as_its_answer(known: EstimateAnswer) -> None:
    fields = {name: getattr(known, name) for name in known.__struct_fields__}
    answer = TraceAnswer(**fields, alive=(), num_events=1234, libraries=())
    traced = Traced(answer, trace=object())  # type: ignore[arg-type]  # a program is never looked at
    assert shown(traced)[0] == answer._repr_html_()
    assert repr(traced).startswith("<Traced, 1,234 events: <TraceAnswer of Qwen/Qwen2.5-0.5B, lora: fits")


def test_what_does_not_fit_says_why_and_what_is_unknown_says_that(known: EstimateAnswer) -> None:
    config = known.config
    small = estimate(config, device=device_from_memory(1 * GIB), offline=True)
    assert small.fit is not None
    assert " ".join(small.fit.because.split()) in shown(small)[1].text
    unknown = known.with_(estimate=None, fit=None, unknown_because="published only quantized")
    assert "Unknown: published only quantized" in shown(unknown)[1].text
    assert repr(unknown).endswith("lora: unknown>")


def test_figures_of_a_host_have_its_words(known: EstimateAnswer) -> None:
    needed = of(known)
    nothing = needed.context.with_(low_bytes=0, likely_bytes=0, high_bytes=0)
    host = needed.with_(context=nothing, process_bytes=needed.reserved_bytes)
    text = shown(host)[1].text
    assert "of host memory" in text
    assert "tensors" in text
    assert "held by the allocator" not in text


def test_names_are_text(known: EstimateAnswer) -> None:
    named = known.with_(model=EVIL, estimate=of(known).with_(model=EVIL, stack=EVIL))
    assert known.fit is not None
    named = named.with_(fit=known.fit.with_(device=known.fit.device.with_(name=EVIL), because=EVIL, verdict="tight"))
    for value in (named, of(named)):
        text, page = shown(value)
        assert "<script>alert('x')</script>" in page.text
        assert not any(character in text + repr(value) for character in ("\x1b", "\u202e"))


def test_a_shell_shows_one_short_line(known: EstimateAnswer) -> None:
    for value in (known, of(known)):
        assert len(repr(value)) < 250
        assert "\n" not in repr(value)
        assert format_bytes(of(known).need_bytes) in repr(value)
    assert repr(known).startswith("<EstimateAnswer of Qwen/Qwen2.5-0.5B, lora: fits, needs ")


# -- plans


def test_a_recommendation_shows_every_plan_with_its_bar_and_its_reasons() -> None:
    config = build_config({"model.id": "Qwen/Qwen2.5-7B", "lora.rank": 16}).config
    found = recommend(config, device=find_device("rtx 3090"), offline=True)
    text, page = shown(found)
    assert len(bars(text)) == len(found.plans) > 1
    for plan in found.plans:
        assert all(" ".join(why.split()) in page.text for why in plan.why)
        assert format_bytes(plan.estimate.need_bytes) in page.text
        assert all(" ".join(why.split()) in shown(plan)[1].text for why in plan.why)
        assert len(repr(plan)) < 250
    assert len(repr(found).splitlines()) == 1 + len(found.plans)


def test_where_nothing_fits_the_misses_are_called_that() -> None:
    config = build_config({"model.id": "Qwen/Qwen2.5-7B", "lora.rank": 16}).config
    found = recommend(config, device=device_from_memory(2 * GIB), offline=True)
    assert found.plans == ()
    assert "No plan fits; the nearest misses" in shown(found)[1].text
    assert "no plan fits" in repr(found)


# -- runs


def record(known: EstimateAnswer, **changes: Any) -> RunRecord:
    whole: dict[str, Any] = {
        "kind": "train",
        "outcome": "success",
        "started_at": "2026-11-30T07:00:00+00:00",
        "requested": known.config,
        "fingerprint": "f",
        "checks": (Check(field="lora.rank", moment="before", requested="16", effective="16"),),
        "code": CodeIdentity(foretune="0", source_sha256="0", python="3", libraries=()),
        "process": ProcessIdentity(pid=4, host="canary-host"),
        "base": BaseIdentity(id="b"),
        "hardware": Hardware(device="Tesla T4"),
        "prediction": known.estimate,
        "readings": (
            PhaseReading(phase="load", peak_allocated_bytes=900 * MIB),
            PhaseReading(phase="rehearsal", peak_allocated_bytes=1000 * MIB),
            PhaseReading(phase="save"),
        ),
        "scope": Scope(num_updates=4, updates_done=4, num_tokens=100, seconds=2.0, first_loss=2.0, last_loss=1.0),
    }
    return RunRecord(**{**whole, **changes})


def test_a_record_shows_measured_beside_predicted_phase_by_phase(known: EstimateAnswer) -> None:
    text, page = shown(record(known))
    load = next(phase for phase in of(known).phases if phase.phase == "load").allocated_bytes
    assert f"load 900.0 MiB {format_bytes(load)}" in page.text
    assert "rehearsal 1000.0 MiB -" in page.text
    assert "save" not in page.text.partition("Verified")[0].partition("Begun")[2]
    assert f"all 1000.0 MiB {format_bytes(of(known).allocated_bytes)}" in page.text
    assert all(word in page.text for word in ("measured", "predicted (estimated)", "50 tokens/s", "0 differ"))
    assert len(bars(text)) == 3
    assert "canary-host" not in text


def test_a_record_without_figures_says_so(known: EstimateAnswer) -> None:
    bare = record(known, readings=(), prediction=None, scope=None, checks=(), hardware=None, outcome="started")
    assert "Memory was not measured." in shown(bare)[1].text
    assert bare.peak_pair is None
    unpredicted = record(known, prediction=None)
    assert unpredicted.peak_pair is not None
    assert unpredicted.peak_pair.predicted_bytes is None
    assert "predicted (unknown)" in shown(unpredicted)[1].text


def test_a_failed_run_says_how_and_its_texts_are_text(known: EstimateAnswer) -> None:
    failed = record(known, outcome="oom", failure=Failure(code="oom", message=EVIL), warnings=(EVIL,), started_at=EVIL)
    text, page = shown(failed)
    assert "Failed: <script>" in page.text
    assert not any(character in text + repr(failed) for character in ("\x1b", "\u202e"))
    assert repr(record(known)) == (
        "<RunRecord of train: success, Qwen/Qwen2.5-0.5B, lora, begun 2026-11-30T07:00:00+00:00>"
    )
