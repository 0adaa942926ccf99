"""What a command answers, and how the answer or the failure gets out: text for a person, one JSON document else."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from foretune import __version__
from foretune.cli.terminal import Terminal, escape, make_tolerant, standard_streams, terminal_for, wrapped_message
from foretune.errors import ForetuneError

__all__ = ["Output", "Reply"]


class Reply(NamedTuple):
    """An answer in both forms; each is made only when it is asked for."""

    schema: str
    """`estimate` stands for `foretune.estimate/1`."""
    document: Callable[[], dict[str, Any]]
    draw: Callable[[Terminal], Iterable[str]]
    exit_code: int = 0
    notes: tuple[str, ...] = ()
    """Said on stderr beside the text."""
    is_event: bool = False
    """A step on the way to an answer: told with `--json` alone; a person sees it as progress."""


class Output:
    """The two streams of one call, and what the command line says about them.

    `--json`, `--color` and `--debug` are looked for in the raw arguments, so that they hold when parsing fails.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        own = arguments[: arguments.index("--")] if "--" in arguments else arguments
        self.is_json = "--json" in own
        self.is_debug = "--debug" in own
        self.is_stream = False
        """Whether several documents are written, each on a line: what ends them early is one too."""
        color = _value_of("--color", own)
        self.stdout, self.stderr = standard_streams()
        make_tolerant(self.stdout, self.stderr)
        self.terminal = terminal_for(self.stdout, color)
        self.error_terminal = terminal_for(self.stderr, color)

    def answer(self, reply: Reply) -> int:
        """Write one answer. Returns its exit code."""
        if self.is_json:
            self._write_document(_stamped(reply.schema, reply.document()))
        else:
            self.say(reply.notes)
            lines = [self.terminal.fitted(line) for line in reply.draw(self.terminal)]
            self.stdout.write("".join(f"{line}\n" for line in lines))
        self.stdout.flush()
        return reply.exit_code

    def stream(self, replies: Iterable[Reply | ForetuneError]) -> int:
        """Write several answers: one JSON document a line, or blocks of text. Failures stand among them.

        Returns the exit code of the first failure, else the largest.
        """
        self.is_stream = True
        failed, largest, number = 0, 0, 0
        for reply in replies:
            if isinstance(reply, ForetuneError):
                failed = failed or self.fail(reply.as_json())
            elif reply.is_event and not self.is_json:
                continue
            elif self.is_json:
                self._write_document(_stamped(reply.schema, reply.document()))
                self.stdout.flush()
                largest = max(largest, reply.exit_code)
            else:
                self.stdout.write("\n" if number else "")
                largest = max(largest, self.answer(reply))
                number += 1
        return failed or largest

    def fail(self, error: dict[str, Any]) -> int:
        """Write a failure: to stdout as JSON, else to stderr as text. Returns its exit code."""
        if self.is_json:
            self._write_document(_stamped("error", {"error": _escaped(error)}))
            self.stdout.flush()
        else:
            terminal = self.error_terminal
            lines = [line for problem in error["problems"] for line in _problem_lines(problem, terminal)]
            if error.get("record"):
                lines.append(f"  {terminal.paint('record:', 'cyan')} {escape(error['record'])}")
            with suppress(OSError):  # a terminal that was closed: the exit code is all there is
                self.stderr.write("".join(f"{terminal.fitted(line)}\n" for line in lines))
                self.stderr.flush()
        return int(error["exit_code"])

    def say(self, notes: Iterable[str]) -> None:
        """Write notes for a person to stderr."""
        for note in notes:
            self.stderr.write(f"{self.error_terminal.fitted(note)}\n")

    def _write_document(self, document: dict[str, Any]) -> None:
        from foretune.values import encode_json

        text = encode_json(document)
        if self.is_stream:
            text = " ".join(line.strip() for line in text.split("\n"))
        if not self.terminal.has_unicode:
            text = "".join(c if c.isascii() else _json_escape(c) for c in text)
        self.stdout.write(f"{text}\n")


def _stamped(schema: str, document: dict[str, Any]) -> dict[str, Any]:
    return {"schema": f"foretune.{schema}/1", "version": __version__, **document}


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    for position, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
        if argument == flag and position + 1 < len(arguments):
            return arguments[position + 1]
    return None


def _json_escape(character: str) -> str:
    """Escape a character of a JSON text for a stream that cannot encode it (outside the BMP: as two halves)."""
    data = character.encode("utf-16-be")
    return "".join(f"\\u{data[i]:02x}{data[i + 1]:02x}" for i in range(0, len(data), 2))


def _escaped(value: Any) -> Any:
    """Escape the texts of an error, which may hold what somebody passed to us."""
    if isinstance(value, str):
        return "\n".join(escape(line) for line in value.split("\n"))
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, (list, tuple)) else value


def _problem_lines(problem: dict[str, Any], terminal: Terminal) -> list[str]:
    place = f"{escape(problem['place'])}: " if problem["place"] else ""
    error, hint = terminal.paint("error:", "bold", "red"), terminal.paint("hint:", "cyan")
    lines = wrapped_message(f"{place}{_escaped(problem['message'])}", terminal, first=f"{error} ", later="  ")
    if problem["hint"]:
        lines += wrapped_message(_escaped(problem["hint"]), terminal, first=f"  {hint} ", later="    ")
    return lines
