"""What killed runs left in a folder."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from machine.planted import NOBODY

from foretune.durable import STAGED, draft_of, staged
from foretune.machine import folder_findings
from foretune.machine import leftovers as leftovers_module
from foretune.machine.leftovers import leftovers, unfinished_runs
from foretune.machine.privacy import Private
from foretune.runtime.run_folder import CONFIG, LOCK, RECORD, is_held


def aged(path: Path) -> Path:
    os.utime(path, (1_000_000_000, 1_000_000_000))
    return path


def draft_folder(parent: Path, name: str = ".staged-adapter-x1") -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    (parent / name).mkdir()
    return aged(parent / name)


def run(folder: Path, outcome: str = "started", host: str | None = None) -> Path:
    folder.mkdir(parents=True)
    record = {
        "schema": "foretune.record/1",
        "outcome": outcome,
        "started_at": "2026-11-30T07:00:00+00:00",
        "process": {"pid": 4, "host": host or socket.gethostname()},
    }
    (folder / RECORD).write_text(json.dumps(record))
    (folder / CONFIG).write_text("model: {id: gpt2}\n")
    return folder


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    (finding,) = folder_findings(tmp_path, NOBODY)
    assert finding.state == "ok"


def test_every_draft_that_a_run_leaves_is_listed_with_a_line_that_removes_it(tmp_path: Path) -> None:
    draft_folder(tmp_path)
    draft_folder(tmp_path / "runs/first/checkpoints", ".staged-update-4-999999999-ab")
    draft_folder(tmp_path / "a b", ".staged-gone-model")
    small = [draft_of(tmp_path / "runs/first" / name) for name in ("record.json", "config.yaml", "updates.jsonl")]
    small.append(draft_of(tmp_path / "runs/second.failed-start.json"))
    for path in small:
        path.write_text("")
        aged(path)
    findings = list(folder_findings(tmp_path, NOBODY))
    assert len(findings) == 7
    assert {finding.state for finding in findings} == {"problem"}
    for finding in findings:
        (line,) = finding.run
        subprocess.run(shlex.split(line), cwd=tmp_path, check=True)
    assert [finding.state for finding in folder_findings(tmp_path, NOBODY)] == ["ok"]
    assert (tmp_path / "runs/first/checkpoints").is_dir()


def test_the_names_are_those_that_the_runtime_gives(tmp_path: Path) -> None:
    with staged(tmp_path / "adapter") as draft:
        aged(draft)
        assert leftovers(tmp_path) == []  # this process is alive
        left = draft.rename(draft.with_name(draft.name.replace(str(os.getpid()), "999999999")))
        assert [each.path for each in leftovers(tmp_path)] == [left.relative_to(tmp_path)]


def test_what_may_still_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".staged-model-x").mkdir()  # just touched
    partial = aged_file(tmp_path / f".plan.svg.{os.getpid()}.tmp")
    assert leftovers(tmp_path) == []
    partial.rename(tmp_path / ".plan.svg.999999999.tmp")
    assert [left.path.name for left in leftovers(tmp_path)] == [".plan.svg.999999999.tmp"]


def aged_file(path: Path) -> Path:
    path.write_text("")
    return aged(path)


def test_a_run_whose_lock_is_free_writes_nothing_however_young_its_draft_is(tmp_path: Path) -> None:
    (tmp_path / "first/checkpoints/.staged-update-2-x").mkdir(parents=True)
    assert leftovers(tmp_path) == []
    (tmp_path / "first" / LOCK).write_text("")
    assert [left.path.name for left in leftovers(tmp_path)] == [".staged-update-2-x"]


def test_files_of_other_programs_are_no_leftovers(tmp_path: Path) -> None:
    for name in (".bashrc.new", "record.json.new", ".x.12.tmp", "staged-x", ".notes.txt.99999999.tmp"):
        aged_file(tmp_path / name)
    for name in (".git", "node_modules"):
        draft_folder(tmp_path / name, ".staged-x")
    (tmp_path / "link").symlink_to(tmp_path / ".git", target_is_directory=True)
    assert leftovers(tmp_path) == []


def test_a_run_that_began_and_is_not_held_is_told_with_the_line_that_goes_on(tmp_path: Path) -> None:
    run(tmp_path / "runs/first")
    (finding,) = folder_findings(tmp_path, NOBODY)
    assert finding.state == "problem"
    assert "started, not finished" in finding.found
    assert finding.run == ("foretune train runs/first/config.yaml --resume",)


@pytest.mark.parametrize("outcome", ["success", "interrupted", "oom"])
def test_a_run_that_ended_is_none_of_these(tmp_path: Path, outcome: str) -> None:
    run(tmp_path / "first", outcome)
    assert unfinished_runs(tmp_path) == []


def test_a_run_that_is_held_goes_on_and_its_drafts_are_not_listed(tmp_path: Path) -> None:
    folder = run(tmp_path / "first")
    draft_folder(folder)
    draft_folder(folder / "checkpoints", ".staged-update-1-x")
    with FileLock(folder / LOCK):
        assert is_held(folder)
        assert [finding.state for finding in folder_findings(tmp_path, NOBODY)] == ["ok"]
    assert is_held(folder) is False
    assert len(list(folder_findings(tmp_path, NOBODY))) == 3


def test_a_lock_that_cannot_be_looked_at_counts_as_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run(tmp_path / "first")
    (folder / LOCK).write_text("")
    monkeypatch.setitem(sys.modules, "filelock", None)
    assert is_held(folder) is None
    assert unfinished_runs(tmp_path) == []


def test_a_run_of_another_machine_is_unknown_and_that_machine_is_not_named(tmp_path: Path) -> None:
    run(tmp_path / "first", host="secret-node-7")
    (finding,) = folder_findings(tmp_path, NOBODY)
    assert (finding.state, finding.run) == ("unknown", ())
    assert "secret-node-7" not in f"{finding}"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"schema": 1}', b'{"schema": "foretune.record/1"}', b"[" * 9999])
def test_files_that_are_no_records_are_passed_over(tmp_path: Path, text: bytes) -> None:
    (tmp_path / RECORD).write_bytes(text)
    assert unfinished_runs(tmp_path) == []


def test_a_name_that_is_not_to_be_shown_has_no_line(tmp_path: Path) -> None:
    draft_folder(tmp_path / "alice", ".staged-a")
    draft_folder(tmp_path / "b", ".staged-\x1b[2J")
    findings = list(folder_findings(tmp_path, Private(names=frozenset({"alice"}))))
    assert [finding.run for finding in findings] == [(), ()]
    assert not any(word in f"{finding.found}" for finding in findings for word in ("alice", "\x1b"))
    assert all("by hand" in (finding.advice or "") for finding in findings)


def test_many_are_counted_and_a_deep_tree_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(25):
        draft_folder(tmp_path, f".staged-{number:02}")
    draft_folder(tmp_path / "a/b/c/d/e/f", ".staged-too-deep")
    findings = list(folder_findings(tmp_path, NOBODY))
    assert len(findings) == 21
    assert findings[-1].found == "5 more of these"
    monkeypatch.setattr(leftovers_module, "MOST_ENTRIES", 3)
    assert len(leftovers(tmp_path)) == 3


def test_on_windows_the_line_is_powershells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_folder(tmp_path, ".staged-it's")
    monkeypatch.setattr(leftovers_module.sys, "platform", "win32")
    (finding,) = folder_findings(tmp_path, NOBODY)
    assert finding.run == ("Remove-Item -Recurse -LiteralPath '.staged-it''s'",)


def test_a_draft_of_a_living_process_is_no_leftover(tmp_path: Path) -> None:
    for number, pid in enumerate((os.getpid(), 999_999_999)):
        draft = tmp_path / f"{STAGED}model-{pid}-abc{number}"
        draft.mkdir()
        os.utime(draft, (1_000_000_000, 1_000_000_000))
    assert [each.path.name for each in leftovers(tmp_path)] == [f"{STAGED}model-999999999-abc1"]
