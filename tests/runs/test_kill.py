"""Killed wherever it is about to touch the disk, a run leaves nothing half done, and is resumed to the bit."""

import signal
from pathlib import Path

import pytest
from runs.busy_run import RESUME, RUN, SHORT, Left, assert_sound, left_by, record_of, staged, write_busy_config
from runs.fork_server import ForkServer

from foretune.durable import verify_folder

NUM_POINTS = 30
FINISHED = {"adapter", "checkpoints", "config.yaml", "lock", "record.json", "updates.jsonl"}


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Left, list[str]]:
    """Return what a run leaves that nothing stops, and the points at which it could have been."""
    folder = tmp_path_factory.mktemp("undisturbed") / "it"
    write_busy_config(folder, **SHORT)
    assert server.run(folder, *RUN, log=str(folder / "points")).code == 0
    return left_by(folder / "run"), (folder / "points").read_text().splitlines()


PLACES = [pytest.param(number, marks=() if number % 3 == 1 else pytest.mark.full) for number in range(NUM_POINTS)]


def test_the_points_cover_checkpoints_pruning_evaluation_and_saving(undisturbed: tuple[Left, list[str]]) -> None:
    left, points = undisturbed
    assert len(points) > 2 * NUM_POINTS
    assert len(left.evaluations) == 2
    for point in ("stage", "rename", "published", "append", "save weights", "replace record.json"):
        assert point in points
    assert [point for point in points if point.startswith("remove update-")] != []


@pytest.mark.parametrize("place", PLACES)
def test_killed_at_any_point_it_is_resumed_to_the_bit(
    place: int, server: ForkServer, undisturbed: tuple[Left, list[str]], tmp_path: Path
) -> None:
    left, points = undisturbed
    number = 1 + place * (len(points) - 1) // (NUM_POINTS - 1)
    folder = tmp_path / "it"
    write_busy_config(folder, **SHORT)
    assert server.run(folder, *RUN, number=number, kind="kill").code == 128 + signal.SIGKILL, points[number - 1]
    assert_sound(folder)
    has_begun = (folder / "run/record.json").exists()
    assert not has_begun or record_of(folder / "run").outcome == "started"
    again = server.run(folder, *(RESUME if has_begun else RUN))
    assert again.code == 0, again.err
    assert left_by(folder / "run") == left
    assert staged(folder) == []
    assert {path.name for path in (folder / "run").iterdir()} == FINISHED


@pytest.mark.parametrize("point", ["rename", "published"])
def test_an_artifact_is_absent_or_whole(point: str, server: ForkServer, tmp_path: Path) -> None:
    """Killed right before and right after it gets its name."""
    folder = tmp_path / "it"
    write_busy_config(folder, **{**SHORT, "checkpoint__every_updates": ..., "schedule__epochs": 1.0})
    assert server.run(folder, *RUN, point=point, number=1, kind="kill").code == 128 + signal.SIGKILL
    artifact = folder / "run/adapter"
    assert artifact.exists() == (point == "published")
    if artifact.exists():
        verify_folder(artifact)
    assert record_of(folder / "run").outcome == "started"
