"""An estimate as text: the verdict in words, of what the need consists, and what would help."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from foretune.cli.request import FLAGS
from foretune.cli.terminal import Heading, Terminal, escape, table, wrapped
from foretune.memory.words import HOST_WORDS, Words, interval_text, need_sentence, words_of
from foretune.units import format_bytes

if TYPE_CHECKING:
    from foretune.api import EstimateAnswer, Fit, MemoryEstimate
    from foretune.contract import Origin, TrainingConfig
    from foretune.memory import Change, Component

__all__ = ["draw_estimate", "flags_of"]

BAR_WIDTH = 24
_PAINTS = {"fits": "green", "tight": "yellow", "does not fit": "red", "unknown": "yellow"}
_NUM_CHANGES = 3
LATER = " (later)"


def draw_estimate(
    answer: "EstimateAnswer",
    origins: "Mapping[str, Origin]",
    terminal: Terminal,
    *,
    title: str | None = None,
    notes: Sequence[str] = (),
    explain: bool = False,
) -> Iterator[str]:
    """Yield the lines of an answer."""
    needed = answer.estimate
    if title is not None:
        yield terminal.paint(escape(title), "bold")
    if answer.unknown_because is not None:
        yield from _unknown(answer.unknown_because, terminal)
    if needed is None:
        return
    yield from _headline(answer, needed, terminal)
    yield from _request(answer.config, needed, terminal)
    if answer.fit is not None:
        yield from _advice(answer.fit, needed.method, terminal, has_file=title is not None)
    words = words_of(needed)
    yield ""
    yield from _components(needed, words, terminal)
    yield ""
    yield from _need(needed, words, terminal)
    yield ""
    yield from _phases(needed, words, terminal)
    yield ""
    yield from _host(needed, words, terminal)
    chosen = [_chosen(answer.config, path, origin) for path, origin in origins.items()]
    chosen = [text for text in chosen if text]
    yield from _remarks("Assumed", [*chosen, *needed.assumptions, *notes], terminal)
    if answer.fit is not None:
        yield from _remarks("About the device", answer.fit.device.notes, terminal)
    yield from _remarks("Not tested against a measurement", needed.untested_paths, terminal)
    if explain:
        yield from _explained(needed.components, needed.kind, terminal)


def _unknown(because: str, terminal: Terminal) -> list[str]:
    lines = wrapped(f"Unknown: {escape(because)}", terminal)
    return [terminal.paint("Unknown", "bold", _PAINTS["unknown"]) + lines[0][len("Unknown") :], *lines[1:]]  # type: ignore[arg-type]


def _headline(answer: "EstimateAnswer", needed: "MemoryEstimate", terminal: Terminal) -> list[str]:
    lines, fit = wrapped(escape(need_sentence(needed, answer.fit)), terminal), answer.fit
    if fit is None:
        return lines
    verdict = lines[0][: len(fit.verdict)]
    return [terminal.paint(verdict, "bold", _PAINTS[fit.verdict]) + lines[0][len(verdict) :], *lines[1:]]  # type: ignore[arg-type]


def _request(config: "TrainingConfig", needed: "MemoryEstimate", terminal: Terminal) -> list[str]:
    lora = config.lora
    parts = [needed.method if lora is None else f"{needed.method} of rank {lora.rank}", config.precision.dtype]
    batch = config.batch
    parts.append(f"{batch.micro_batch_size:,} x {batch.sequence_length:,} tokens")
    if batch.accumulation_steps > 1:
        parts.append(f"{batch.accumulation_steps:,} microsteps an update")
    parts += [config.optimizer.name, f"{needed.attention_kernel.replace(':', '')} attention", f"{config.loss} loss"]
    parts.append("recomputed activations" if config.gradient_checkpointing else "kept activations")
    return wrapped(f"{escape(needed.model)}: {', '.join(parts)}.", terminal)


def _advice(fit: "Fit", method: str, terminal: Terminal, *, has_file: bool) -> Iterator[str]:
    if fit.verdict != "fits":
        yield from wrapped(escape(fit.because), terminal)
    if fit.changes:
        yield ""
        yield terminal.paint("Nearest changes (re-estimated)", "bold")
        for change in fit.changes[:_NUM_CHANGES]:
            flags = " ".join(flags_of(change, method, has_file=has_file))
            text = f"{change.label}: needs {format_bytes(change.need_bytes)}, {change.verdict} ({flags})"
            yield from wrapped(text, terminal, indent="  ", bullet="- ")


def flags_of(change: "Change", method: str, *, has_file: bool) -> list[str]:
    """Write a change as flags that can be put behind the command: a later flag takes an earlier one's place.

    Of two `--set` of one field the user must keep one. A method comes as a flag, with its defaults, except beside a
    file, which may say otherwise.
    """
    short = {path: flag for flag, path in FLAGS.values()}
    is_method = change.method != method and not has_file
    flags = [f"--method {change.method}"] if is_method else []
    for setting in change.settings:
        path, _, value = setting.partition("=")
        if is_method and path.startswith(("lora.", "quantization.")):
            continue
        if path == "gradient_checkpointing":
            flags.append("--gradient-checkpointing")
        else:
            flags.append(f"{short[path]} {value}" if path in short else f"--set {setting}")
    return flags


def _components(needed: "MemoryEstimate", words: Words, terminal: Terminal) -> Iterator[str]:
    title = f"{words.at_the_peak} at the peak, in {escape(needed.peak_phase)} ({needed.kind})"
    yield from _titled(title, terminal)
    total = max(needed.allocated_bytes, 1)
    parts = [part for part in needed.components if part.num_bytes]
    for part in sorted(parts, key=lambda part: -part.num_bytes):
        bar = terminal.bar(part.num_bytes / total, max(min(BAR_WIDTH, terminal.width - 34), 0))
        yield f"  {_row(part.name, part.num_bytes)}  {terminal.paint(bar, 'cyan')}".rstrip()
    yield f"  {_row(words.allocated, needed.allocated_bytes)}  {interval_text(needed.allocated_interval)}"


def _row(name: str, num_bytes: int) -> str:
    return f"{name:<18}{format_bytes(num_bytes):>12}"


def _need(needed: "MemoryEstimate", words: Words, terminal: Terminal) -> Iterator[str]:
    yield from _titled(f"{words.must_be_free} ({needed.kind})", terminal)
    context = needed.context
    is_known = context.low_bytes == context.high_bytes
    span = f"{format_bytes(context.low_bytes)} to {format_bytes(context.high_bytes)}: "
    process = interval_text(needed.process_interval)
    rows = [
        (words.reserved, needed.reserved_bytes, f"{words.held}; {interval_text(needed.reserved_interval)}"),
        ("context" if is_known else "context, at most", context.high_bytes, ("" if is_known else span) + context.basis),
        ("safety margin", needed.safety_margin_bytes, needed.safety_margin_basis),
        ("need", needed.need_bytes, f"process alone: {format_bytes(needed.process_bytes)}; {process}"),
    ]
    if words is HOST_WORDS:
        rows = [rows[0], rows[2], ("need", needed.need_bytes, "of the host's memory, for the process' growth")]
    for name, num_bytes, text in rows:
        row = f"  {_row(name, num_bytes)}"
        if terminal.width < len(row) + 24:
            yield from (row, *wrapped(escape(text), terminal, indent="    "))
        else:
            lines = wrapped(escape(text), terminal, indent=" " * (len(row) + 2))
            yield row + lines[0][len(row) :]
            yield from lines[1:]


def _phases(needed: "MemoryEstimate", words: Words, terminal: Terminal) -> list[str]:
    """Draw allocated and reserved peaks of each phase, the first update beside the later ones."""
    peaks: dict[str, dict[bool, tuple[str, str]]] = {}
    for phase in needed.phases:
        name = phase.phase.removesuffix(LATER)
        pair = format_bytes(phase.allocated_bytes), format_bytes(phase.reserved_bytes)
        peaks.setdefault(name, {})[phase.phase != name] = pair
    columns = (words.allocated, words.reserved, f"later: {words.allocated}", words.reserved)
    headings = (Heading(f"Phase ({needed.kind})"), *(Heading(name, is_number=True) for name in columns))
    nothing = ("", "")
    rows = [(f"  {escape(name)}", *both.get(False, nothing), *both.get(True, nothing)) for name, both in peaks.items()]
    return table(headings, rows, terminal)


def _host(needed: "MemoryEstimate", words: Words, terminal: Terminal) -> list[str]:
    host = needed.host
    ram = (
        f"Host (estimated): {format_bytes(host.ram_load_bytes)} RAM while loading, "
        f"{format_bytes(host.ram_save_bytes)} while saving; "
    )
    text = (
        f"{'Disk (estimated): ' if words is HOST_WORDS else ram}download {format_bytes(host.download_bytes)}; "
        f"result {format_bytes(host.artifact_bytes)}, {format_bytes(host.disk_bytes)} of disk to save it."
    )
    return wrapped(text, terminal)


def _titled(title: str, terminal: Terminal) -> list[str]:
    return [terminal.paint(line, "bold") for line in wrapped(title, terminal)]


def _remarks(title: str, texts: Sequence[str], terminal: Terminal) -> Iterator[str]:
    if not texts:
        return
    yield ""
    yield from _titled(title, terminal)
    for text in texts:
        yield from wrapped(escape(text), terminal, indent="  ", bullet="- ")


def _chosen(config: "TrainingConfig", path: str, origin: "Origin") -> str:
    """Say what the command line chose where nobody did; nothing for all other settings."""
    if origin.source != "command-line default":
        return ""
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    reason = f": {origin.place}" if origin.place else ""
    return f"{path}: {value} ({origin.source}{reason})"


def _explained(parts: "Sequence[Component]", kind: str, terminal: Terminal) -> Iterator[str]:
    for part in parts:
        yield ""
        title = f"{part.name}: {format_bytes(part.num_bytes)} ({kind}; {part.num_bytes:,} bytes)"
        yield from _titled(title, terminal)
        yield from wrapped(escape(part.formula), terminal, indent="  ")
        for symbol, value in part.inputs:
            yield from wrapped(f"{escape(symbol)} = {value:,}", terminal, indent="    ")
        yield from wrapped(f"Source: {escape(part.source)}", terminal, indent="  ")
