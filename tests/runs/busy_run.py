"""A small run in which everything happens that a resumed run must do again to the bit, and what it leaves."""

import json
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

from runs.made_run import model_folder, settings

from foretune.contract import build_config, dump_config
from foretune.durable import MANIFEST, verify_folder
from foretune.evidence import RunRecord, read_record
from foretune.runtime.artifact import ARTIFACT
from foretune.runtime.checkpoint import checkpoints

NUM_UPDATES = 9
RUN = ("train", "run.yaml", "--workers", "1")
RESUME = (*RUN, "--resume")


SHORT: dict[str, Any] = {
    "num_rows": 10,
    "schedule__epochs": 2.0,
    "schedule__warmup_updates": 1,
    "checkpoint__every_updates": 1,
    "checkpoint__keep": 1,
}
"""Four updates, of 3 and 1 micro batches, with a checkpoint after each, of which the newest and the best are kept."""


def write_busy_config(folder: Path, **changes: Any) -> Path:
    """Write `run.yaml`: three epochs of three updates, of 3, 3 and 2 micro batches, with dropout, warm-up, a held-out
    part and checkpoints. `lora=None` trains every weight; the model itself has dropout then.
    """
    folder.mkdir(exist_ok=True)
    fields = {
        "batch__accumulation_steps": 3,
        "schedule__epochs": 3.0,
        "schedule__warmup_updates": 2,
        "evaluation__split": 0.2,
        "evaluation__every_updates": 2,
        "checkpoint__every_updates": 3,
        "checkpoint__keep": 2,
        **changes,
    }
    if fields.pop("lora", "") is None:
        fields["model"] = fields.get("model", model_folder(attention_dropout=0.1))
    else:
        fields |= {"lora.rank": 4, "lora.alpha": 8.0, "lora.dropout": 0.1}
    fields.setdefault("num_rows", 20)
    path = folder / "run.yaml"
    path.write_text(dump_config(build_config({**settings(folder, **fields), "output": str(folder / "run")}).config))
    return path


class Left(NamedTuple):
    """What a finished run leaves that depends on no clock."""

    history: tuple[str, ...]
    artifact: dict[str, str]
    """SHA-256 of each file, but for what it says about itself: the fingerprint there knows where the run lies."""
    facts: dict[str, Any]
    checkpoints: dict[str, dict[str, str]]
    """The same of the optimizer's states, the weights and the random states."""
    evaluations: tuple[Any, ...]
    best: tuple[int | None, str | None]
    """The update of the best evaluation, and its checkpoint."""


def left_by(run: Path) -> Left:
    """Read what a run leaves; everything it wrote is whole."""
    record = record_of(run)
    assert record.outcome == "success", record.failure
    assert record.artifact is not None
    best = record.best_update, record.best_checkpoint
    assert best[1] is None or (run / best[1]).is_dir()
    artifact = _digests(run / record.artifact)
    del artifact[ARTIFACT]
    facts = {**json.loads((run / record.artifact / ARTIFACT).read_text()), "fingerprint": None}
    kept = {str(update): _digests(path) for update, path in checkpoints(run / "checkpoints")}
    return Left(history(run), artifact, facts, kept, record.evaluations, best)


def record_of(run: Path) -> RunRecord:
    return read_record(run / "record.json")


def history(run: Path) -> tuple[str, ...]:
    """Return the lines of updates and evaluations without what a clock says."""
    entries = [json.loads(line) for line in (run / "updates.jsonl").read_text().splitlines()]
    return tuple(json.dumps({name: entry[name] for name in entry if name != "tokens_per_second"}) for entry in entries)


def _digests(folder: Path) -> dict[str, str]:
    verify_folder(folder)
    names = {path.name for path in folder.iterdir()}
    listed = json.loads((folder / MANIFEST).read_bytes())
    assert names == {*listed, MANIFEST}
    return {name: sha256(_content(folder / name)).hexdigest() for name in sorted(listed)}


def _content(path: Path) -> bytes:
    """Return a file as it is compared: a checkpoint that a signal asked for is written before an evaluation that is due
    and stays, so it alone does not know that one."""
    if path.name != "state.json":
        return path.read_bytes()
    state = json.loads(path.read_bytes())
    del state["progress"]["evaluations"]
    return json.dumps(state).encode()


def assert_sound(folder: Path) -> None:
    """Whatever happened: an artifact is absent or whole, as are checkpoints that count, and the record can be read."""
    run = folder / "run"
    for name in ("adapter", "model"):
        if (run / name).exists():
            _digests(run / name)
    for _, path in checkpoints(run / "checkpoints"):
        _digests(path)
    if (run / "record.json").exists():
        record_of(run)


def staged(folder: Path) -> list[str]:
    """Return what is unfinished below a folder."""
    found = [path for path in folder.rglob(".*") if path.name.startswith(".staged") or path.name.endswith(".new")]
    return sorted(str(path.relative_to(folder)) for path in found)


def encoders_of(session: int) -> list[int]:
    """Return the processes of a session that encode rows, after a moment in which those that are ending may end."""
    until = monotonic() + 10
    while (found := _encoders_of(session)) and monotonic() < until:
        sleep(0.01)
    return found


def _encoders_of(session: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()  # state, parent, group, session: proc(5)
            command = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[3]) == session and b"foretune.runtime.encoder" in command:
            found.append(int(path.name))
    return found


def flip_byte(path: Path, place: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
