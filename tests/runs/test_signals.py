"""Ctrl-C and SIGTERM at any time: one record, one exit code that agrees with it, no process left, nothing half done."""

import random
import signal
import threading
import weakref
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from runs.busy_run import (
    RESUME,
    RUN,
    SHORT,
    assert_sound,
    encoders_of,
    left_by,
    record_of,
    staged,
    write_busy_config,
)
from runs.fork_server import Ended, ForkServer

from foretune.errors import RunDirectoryError
from foretune.evidence import read_record
from foretune.runtime.interrupts import Interrupts, Stopped
from foretune.runtime.run_folder import open_run

NUM_SIGNALS = 50
NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Undisturbed:
    """A run that nothing stops, and how long it took: with its own encoding, as each of these has."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        write_busy_config(folder, **SHORT)
        start = monotonic()
        assert server.run(folder, *RUN, "--no-cache", predicts=True).code == 0
        self.seconds = monotonic() - start
        self.left = left_by(folder / "run")


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(server, tmp_path_factory.mktemp("undisturbed") / "it")


def the_record(folder: Path) -> Path | None:
    """Return the one record of a start; None where nothing had begun."""
    found = [path for path in (folder / "run/record.json", folder / "run.failed-start.json") if path.exists()]
    assert len(found) <= 1, found
    return found[0] if found else None


def assert_one_end(ended: Ended, folder: Path, number: int) -> str | None:
    """Check that record, exit code and folder say the same; return the outcome."""
    assert "Traceback" not in ended.err, ended.err
    assert "Exception ignored" not in ended.err, ended.err
    assert encoders_of(ended.pid) == []
    assert staged(folder) == []
    assert_sound(folder)
    path = the_record(folder)
    outcome = None if path is None else read_record(path).outcome
    if outcome == "success" and ended.code:
        assert ended.out.startswith("Trained"), ended.err  # it came when the answer was out
    else:
        assert ended.code == (0 if outcome == "success" else 128 + number), (outcome, ended.err)
        assert outcome in ("success", "interrupted", None)
    assert (folder / "run/adapter").exists() == (outcome == "success")
    return outcome


# -- at random times


@pytest.mark.parametrize(
    "trial", [pytest.param(each, marks=() if each % 7 == 3 else pytest.mark.full) for each in range(NUM_SIGNALS)]
)
def test_a_signal_at_any_time_is_one_record_and_one_exit_code(
    trial: int, server: ForkServer, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Spread over the whole run, from its start to its end, and a little random; to the group as a terminal does."""
    drawn = random.Random(trial)
    number = NUMBERS[trial % 2]
    after = undisturbed.seconds * (trial + drawn.random()) / NUM_SIGNALS
    folder = tmp_path / "it"
    write_busy_config(folder, **SHORT)
    child = server.start(folder, *RUN, "--no-cache", predicts=True)
    child.signal(number, after=after, group=trial % 4 < 2)
    outcome = assert_one_end(child.wait(), folder, number)
    if outcome != "interrupted" or not (folder / "run").exists():
        return
    record = record_of(folder / "run")
    updates = record.scope.updates_done if record.scope else 0
    names = [path.name for path in (folder / "run/checkpoints").iterdir()]
    assert updates == 0 or f"update-{updates:08}" in names
    assert server.run(folder, *RESUME).code == 0
    assert left_by(folder / "run") == undisturbed.left


# -- at given points


@pytest.mark.parametrize(
    ("point", "number"),
    [
        ("write .holder.json.new", signal.SIGINT),
        ("write .record.json.new", signal.SIGTERM),
        ("replace config.yaml", signal.SIGINT),
        ("append", signal.SIGTERM),
    ],
)
def test_a_signal_where_the_run_begins_is_no_lost_record(
    point: str, number: int, server: ForkServer, tmp_path: Path
) -> None:
    folder = tmp_path / "it"
    write_busy_config(folder, **SHORT)
    ended = server.run(folder, *RUN, point=point, number=1, kind="signal", signal=number)
    outcome = assert_one_end(ended, folder, number)
    assert outcome == ("interrupted" if point != "write .holder.json.new" else None)
    if outcome is None:
        assert server.run(folder, *RUN).code == 0


@pytest.mark.parametrize("point", ["save weights", "replace record.json"])
def test_a_signal_that_comes_too_late_does_not_take_the_artifact_away(
    point: str, server: ForkServer, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Twice even: what is being saved is finished, and the run has ended well."""
    folder = tmp_path / "it"
    write_busy_config(folder, **{**SHORT, "checkpoint__every_updates": ...})
    number = {"save weights": 1, "replace record.json": 8}[point]
    fault = {"point": point, "number": number, "kind": "signal", "signal": signal.SIGINT, "twice": True}
    ended = server.run(folder, *RUN, **fault)
    assert (assert_one_end(ended, folder, signal.SIGINT), ended.code) == ("success", 0)
    assert left_by(folder / "run").artifact == undisturbed.left.artifact


def test_two_signals_end_at_once(server: ForkServer, tmp_path: Path) -> None:
    """The first one would have ended the run after its update, with a checkpoint."""
    folder = tmp_path / "it"
    write_busy_config(folder, **SHORT)
    fault = {"point": "append", "number": 2, "kind": "signal", "signal": signal.SIGTERM, "twice": True}
    ended = server.run(folder, *RUN, **fault)
    assert assert_one_end(ended, folder, signal.SIGTERM) == "interrupted"
    assert [path.name for path in (folder / "run/checkpoints").iterdir()] == ["update-00000001"]
    assert len((folder / "run/updates.jsonl").read_text().splitlines()) == 1


def test_what_nohup_ignores_does_not_end_a_run(server: ForkServer, tmp_path: Path) -> None:
    folder = tmp_path / "it"
    write_busy_config(folder, **SHORT)
    fault = {"point": "append", "number": 2, "kind": "signal", "signal": signal.SIGHUP, "ignored": [signal.SIGHUP]}
    assert server.run(folder, *RUN, **fault).code == 0


# -- two processes, one folder


def test_of_two_processes_one_runs_and_the_other_is_told_who(server: ForkServer, tmp_path: Path) -> None:
    folder = tmp_path / "it"
    write_busy_config(folder, **SHORT)
    children = [server.start(folder, *RUN) for _ in range(2)]
    ended = sorted((child.wait() for child in children), key=lambda each: each.code)
    assert [each.code for each in ended] == [0, 8]
    process = record_of(folder / "run").process
    assert process.pid == ended[0].pid
    assert f"process {process.pid} on {process.host}" in ended[1].err
    left_by(folder / "run")


@pytest.mark.parametrize("arguments", [RUN, RESUME])
def test_a_folder_is_held_as_long_as_its_process_lives(
    arguments: tuple[str, ...], server: ForkServer, tmp_path: Path
) -> None:
    """Stopped in the middle, the holder still holds; killed, it does not."""
    folder = tmp_path / "it"
    write_busy_config(folder, **SHORT)
    holder = server.start(folder, *RUN, point="append", number=2, kind="signal", signal=signal.SIGSTOP)
    assert holder.wait_for(folder / "run/checkpoints/update-00000001")
    second = server.run(folder, *arguments, "--json")
    assert second.code == RunDirectoryError.exit_code
    process = record_of(folder / "run").process
    assert f"process {process.pid} on {process.host}" in second.error["message"]
    holder.signal(signal.SIGKILL)
    assert holder.wait().code == 128 + signal.SIGKILL
    assert server.run(folder, *RESUME).code == 0
    left_by(folder / "run")


def test_a_lock_of_nobody_is_free(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", resumes=False):
        assert {path.name for path in (tmp_path / "run").iterdir()} == {"lock", "holder.json"}
        with pytest.raises(RunDirectoryError, match="is busy: process"), open_run(tmp_path / "run", resumes=False):
            pass
    with open_run(tmp_path / "run", resumes=False):
        pass


# -- the parts


def rung(interrupts: Interrupts, *numbers: int) -> None:
    for number in numbers:
        interrupts._heard(number, None)


def test_before_the_first_update_a_signal_ends_at_once_and_says_which() -> None:
    with pytest.raises(Stopped) as caught:
        rung(Interrupts(), signal.SIGTERM)
    assert caught.value.exit_code == 143


def test_who_looks_at_an_event_is_interrupted_by_the_second_signal_alone() -> None:
    interrupts = Interrupts()

    def looked(*numbers: int) -> None:
        with interrupts.outside():
            rung(interrupts, *numbers)
            told.append(len(numbers))

    told: list[int] = []
    with pytest.raises(Stopped):
        looked(signal.SIGINT)
    assert told == [1]
    with pytest.raises(Stopped):
        looked(signal.SIGINT)
    assert told == [1]


def test_after_the_end_nothing_is_heard() -> None:
    interrupts = Interrupts()
    with interrupts.shielded():
        rung(interrupts, signal.SIGINT, signal.SIGINT)
        interrupts.finish()
    rung(interrupts, signal.SIGINT, signal.SIGTERM)


def test_a_signal_while_an_object_dies_is_heard_at_the_next_event(capsys: pytest.CaptureFixture[str]) -> None:
    """Python drops what is raised there, and would print it."""
    died: list[int] = []

    def finalizer(_: object) -> None:
        died.append(1)
        signal.raise_signal(signal.SIGINT)

    def looked_at(interrupts: Interrupts) -> None:
        with interrupts.outside():
            pass

    with Interrupts().listening() as interrupts:
        dies = set[int]()
        reference = weakref.ref(dies, finalizer)
        del dies
        with pytest.raises(Stopped):
            looked_at(interrupts)
    assert (died, reference()) == ([1], None)
    assert capsys.readouterr().err == ""


def test_another_thread_listens_to_nothing_and_handlers_are_put_back() -> None:
    found: list[Any] = []

    def listen() -> None:
        with Interrupts().listening():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [before]
    with Interrupts().listening() as interrupts:
        assert signal.getsignal(signal.SIGINT) == interrupts._heard
    assert signal.getsignal(signal.SIGINT) == before
