"""Plans, boundaries and cards as text."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foretune.cli.drawing import flags_of
from foretune.cli.options import DEFAULT_STACK
from foretune.cli.request import FLAGS
from foretune.cli.terminal import Heading, Terminal, escape, table, wrapped
from foretune.units import format_bytes

if TYPE_CHECKING:
    from foretune.api import Boundary, Carriers, Plan, Recommendation, VerifiedPlan
    from foretune.contract import TrainingConfig
    from foretune.devices import DeviceSpec
    from foretune.models import ModelShape
    from foretune.planner import Carrier

__all__ = ["draw_boundary", "draw_carriers", "draw_recommendation"]

QUESTIONS = {
    "longest-sequence": "longest rows",
    "largest-batch": "largest micro batch",
    "highest-rank": "highest rank",
    "least-memory": "least memory",
    "full-if-it-fits": "all weights if they fit",
}
VALUES = {
    "batch.sequence_length": "tokens a row",
    "batch.micro_batch_size": "rows at once",
    "lora.rank": "rank",
}


def draw_recommendation(
    answer: "Recommendation",
    verified: "Sequence[VerifiedPlan]",
    shape: "ModelShape",
    device: "DeviceSpec | None",
    given: Mapping[str, Any],
    terminal: Terminal,
) -> Iterator[str]:
    """Yield the lines of plans, or of the nearest misses."""
    plans = answer.plans or answer.nearest_misses
    stack = escape(plans[0].estimate.stack)
    where = "" if device is None else f" on {escape(device.name)}, {format_bytes(answer.budget_bytes or 0)}"
    asked = f"{QUESTIONS[answer.objective]} for {escape(shape.id)}{where} (estimated; stack {stack})"
    if answer.plans:
        yield from _titled(asked[0].upper() + asked[1:], terminal)
    else:
        text = f"Nothing fits: {asked}. The nearest misses:"
        yield from wrapped(text, terminal)
    yield ""
    yield from _plan_table(answer, plans, terminal)
    for plan in plans:
        yield ""
        yield from _reasons(plan, device, given, terminal)
    if verified:
        yield ""
        yield from _verified(verified, terminal)
    yield ""
    yield from _account(answer, terminal)
    if answer.plans:
        yield from wrapped("`foretune recipe FOLDER` with the flags of a plan writes it out, ready to run.", terminal)


def _titled(text: str, terminal: Terminal) -> list[str]:
    return [terminal.paint(line, "bold") for line in wrapped(text, terminal)]


def _plan_table(answer: "Recommendation", plans: "Sequence[Plan]", terminal: Terminal) -> list[str]:
    raised = VALUES.get(answer.raises or "")
    headings = [Heading("plan", is_number=True), Heading("method")]
    headings += [Heading(raised, is_number=True)] if raised else []
    headings += [Heading("recompute"), Heading("loss"), Heading("optimizer"), Heading("need", is_number=True)]
    headings += [Heading("verdict")] if answer.plans else []
    rows = []
    for plan in plans:
        config = plan.config
        row = [str(plan.rank), plan.method]
        row += [f"{plan.value:,}"] if raised and plan.value is not None else []
        row += ["yes" if config.gradient_checkpointing else "no", config.loss, config.optimizer.name]
        row.append(format_bytes(plan.estimate.need_bytes))
        rows.append([*row, plan.fit.verdict if plan.fit else ""] if answer.plans else row)
    return table(headings, rows, terminal)


def _reasons(plan: "Plan", device: "DeviceSpec | None", given: Mapping[str, Any], terminal: Terminal) -> Iterator[str]:
    yield terminal.paint(f"Plan {plan.rank}", "bold")
    for why in plan.why:
        yield from wrapped(f"{escape(why)}.", terminal, indent="  ", bullet="- ")
    for change in plan.fit.changes if plan.fit else ():
        flags = " ".join(flags_of(change, plan.method, has_file=False))
        text = f"{change.label}: needs {format_bytes(change.need_bytes)}, {change.verdict} ({flags})"
        yield from wrapped(text, terminal, indent="  ", bullet="- ")
    yield from wrapped(command_of(plan.config, plan.method, given), terminal, indent="    ")


def command_of(config: "TrainingConfig", method: str, given: Mapping[str, Any]) -> str:
    """Return the command that estimates a plan as it stands: what was given, then what was chosen."""
    chosen = {
        "dtype": config.precision.dtype,
        "rank": config.lora.rank if config.lora else None,
        "seq_len": config.batch.sequence_length,
        "micro_batch": config.batch.micro_batch_size,
        "loss": config.loss,
        "optimizer": config.optimizer.name,
    }
    words = ["foretune", "estimate"]
    for file in given["configs"][:1]:
        words += ["--config", file]
    for name in ("gpu", "vram", "free"):
        words += [f"--{name}", str(given[name])] if given[name] is not None else []
    words += [f"--{name}" for name in ("detect", "offline") if given[name]]
    words += ["--stack", given["stack"]] if given["stack"] != DEFAULT_STACK else []
    absent = tuple(f"{section}." for section in ("lora", "quantization") if getattr(config, section) is None)
    for name, (flag, path) in FLAGS.items():
        value = chosen[name] if name in chosen else given[name]
        if name != "gradient_checkpointing" and value is not None and not path.startswith(absent or "-"):
            words += [flag, str(value)]
    words += ["--method", method]
    words.append("--gradient-checkpointing" if config.gradient_checkpointing else "--no-gradient-checkpointing")
    said = {FLAGS[name][1] for name in chosen} | {"gradient_checkpointing"}
    for setting in given["settings"]:
        path = setting.partition("=")[0]
        words += ["--set", setting] if path not in said and not path.startswith(absent or "-") else []
    return shlex.join(words)


def _verified(verified: "Sequence[VerifiedPlan]", terminal: Terminal) -> list[str]:
    headings = [Heading("plan (traced)"), Heading("allocated", is_number=True), Heading("reserved", is_number=True)]
    headings += [Heading("need", is_number=True), Heading("verdict"), Heading("the estimate's peaks")]
    rows = [
        (
            str(each.rank),
            format_bytes(each.allocated_bytes),
            format_bytes(each.reserved_bytes),
            format_bytes(each.need_bytes),
            each.verdict or "",
            "the same to the byte" if each.is_equal else "differ",
        )
        for each in verified
    ]
    return table(headings, rows, terminal)


def _account(answer: "Recommendation", terminal: Terminal) -> Iterator[str]:
    fates = "; ".join(f"{each.count:,} {each.reason}" for each in answer.rejected)
    text = (
        f"{answer.considered:,} candidates considered, {answer.walked:,} walked by their requests, "
        f"{answer.replayed:,} replayed: {fates or 'all fit'}."
    )
    yield from wrapped(text, terminal)
    for reason in answer.refused:
        yield from wrapped(escape(reason), terminal, indent="  ", bullet="- ")


def draw_boundary(
    answer: "Boundary", config: "TrainingConfig", device: "DeviceSpec", terminal: Terminal
) -> Iterator[str]:
    """Yield the lines of a boundary."""
    name, where = VALUES[answer.setting], escape(device.name)
    if answer.value is None or answer.estimate is None:
        needed = format_bytes(answer.next_need_bytes or 0)
        text = f"Nothing fits on {where}: {answer.step:,} {name} need {needed} at least (estimated)."
        yield from wrapped(text, terminal)
        return
    need, stack = format_bytes(answer.estimate.need_bytes), escape(answer.estimate.stack)
    text = f"{answer.value:,} {name} fit on {where}: {need} needed (estimated; stack {stack})."
    yield from wrapped(text, terminal)
    if answer.next_value is None:
        yield from wrapped(f"More is not considered: {answer.limit:,} is the limit.", terminal)
    else:
        more = f"{answer.next_value:,} would need {format_bytes(answer.next_need_bytes or 0)} or more."
        yield from wrapped(more, terminal)
    steps = "" if answer.step == 1 else f"in steps of {answer.step}, "
    yield from wrapped(f"Found {steps}by {answer.num_estimates} estimates; all other settings stayed.", terminal)


def draw_carriers(
    answer: "Carriers", shape: "ModelShape", config: "TrainingConfig", terminal: Terminal
) -> Iterator[str]:
    """Yield the lines of the cards."""
    batch = config.batch
    rows_text = f"{batch.micro_batch_size:,} x {batch.sequence_length:,} tokens"
    title = f"Cards that carry {escape(shape.id)} with {rows_text}, smallest first (estimated)"
    yield from _titled(title, terminal)
    yield ""
    ways: dict[str, str] = {}
    headings = [Heading("card"), Heading("memory", is_number=True), Heading("need", is_number=True)]
    headings += [Heading("dtype"), Heading("verdict"), Heading("way")]
    rows = [
        (
            escape(each.device.name.removeprefix("NVIDIA ")),
            format_bytes(each.device.total_bytes),
            format_bytes(each.need_bytes),
            f"{each.config.precision.dtype}{'*' if each.without_bf16 else ''}",
            each.verdict,
            ways.setdefault(_way(each), "abcdefghijklmnop"[len(ways)]),
        )
        for each in answer.carriers
    ]
    yield from table(headings, rows, terminal)
    yield ""
    for way, letter in ways.items():
        yield from wrapped(way, terminal, bullet=f"{letter}  ")
    if any(each.without_bf16 for each in answer.carriers):
        yield from wrapped("the card has no bfloat16", terminal, bullet="*  ")
    yield ""
    refused = f", {answer.refused:,} cannot run it" if answer.refused else ""
    text = (
        f"{answer.considered:,} cards considered: {answer.too_small:,} are too small{refused}, {answer.not_cuda:,} do "
        "not run CUDA or share their memory with the CPU."
    )
    yield from wrapped(text, terminal)


def _way(each: "Carrier") -> str:
    config = each.config
    activations = "recomputed" if config.gradient_checkpointing else "kept"
    return f"{each.method}, {activations} activations, {config.loss} loss, {config.optimizer.name}"
