"""A process that has imported what a run needs, and forks for each command: a fresh process in a few milliseconds.

A fork of pytest itself would take its threads' locks with it. The server has one thread and runs nothing: a child
begins as a new process does once everything is imported. Requests and answers are lines of JSON.
"""

import ctypes
import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 120
"""After which a child that does not end is a failure."""


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    """As a shell says it: 128 and the number of the signal that killed it."""
    out: str
    err: str
    pid: int

    @property
    def error(self) -> dict[str, Any]:
        """The error of a command that was called with --json."""
        return json.loads(self.out.splitlines()[-1])["error"]


class Child(NamedTuple):
    """A command that was started."""

    pid: int
    folder: Path
    server: "ForkServer"

    def wait(self) -> Ended:
        """Wait for its end."""
        code = self.server.ask({"do": "wait", "pid": self.pid})["code"]
        texts = [(self.folder / f"{self.pid}.{name}").read_text() for name in ("out", "err")]
        return Ended(code, *texts, self.pid)

    def signal(self, number: int, *, after: float = 0.0, group: bool = False) -> None:
        """Send a signal after so many seconds, or none where the command has ended before."""
        self.server.ask({"do": "signal", "pid": self.pid, "number": number, "after": after, "group": group})

    def wait_for(self, path: Path) -> bool:
        """Wait until a file is there; False where the command has ended without it."""
        return bool(self.server.ask({"do": "wait_for", "pid": self.pid, "path": str(path)})["is_there"])


class ForkServer:
    """The side of the tests. Its children share a cache, so that the same rows are encoded once."""

    def __init__(self, cache: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FORETUNE_CACHE": str(cache)},
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "failed" not in answer, answer
        return answer

    def start(self, folder: Path, *arguments: str, **fault: Any) -> Child:
        """Start `foretune ARGUMENTS` in a folder; `fault` is what happens to it (`_Faults`)."""
        request = {"do": "start", "folder": str(folder), "arguments": list(arguments), "fault": fault}
        return Child(self.ask(request)["pid"], folder, self)

    def run(self, folder: Path, *arguments: str, **fault: Any) -> Ended:
        """Run `foretune ARGUMENTS` in a folder to its end."""
        return self.start(folder, *arguments, **fault).wait()

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@contextmanager
def fork_server(cache: Path) -> Iterator[ForkServer]:
    """Give a server, and end it."""
    server = ForkServer(cache)
    try:
        yield server
    finally:
        server.close()


# -- what happens to a child


class _Faults:
    """Counts the points at which a run is about to touch the disk, and lets something happen at one of them.

    point: the name of the point; without it all count. number: which of them, from 1. kind: kill, signal, error, fill.
    signal: which; twice: a second one right after. error: the errno. lasts: it happens from there on.
    spare: bytes that a disk of the child's own (`own_disk`) has left when it is filled.
    log: a file that gets the names of all points. predicts: the memory is predicted, which takes longer than the run.
    """

    def __init__(self, fault: dict[str, Any]) -> None:
        self.fault, self.passed = fault, 0

    def at(self, point: str) -> None:
        fault = self.fault
        if "log" in fault:
            with Path(fault["log"]).open("a") as file:
                print(point, file=file)
        if "number" not in fault or fault.get("point", point) != point:
            return
        self.passed += 1
        if self.passed == fault["number"] or (fault.get("lasts") and self.passed > fault["number"]):
            self._happen(point)

    def _happen(self, point: str) -> None:
        fault = self.fault
        if fault["kind"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault["kind"] == "signal":
            for _ in range(1 + fault.get("twice", False)):
                os.kill(os.getpid(), fault["signal"])
        elif fault["kind"] == "fill":
            free = shutil.disk_usage(fault["own_disk"]).free
            (Path(fault["own_disk"]) / "ballast").write_bytes(b"." * max(0, free - fault["spare"]))
        # A folder is removed by calls whose errors are passed over; an error of the hook's own would prove nothing.
        elif not point.startswith("remove "):
            raise OSError(fault["error"], os.strerror(fault["error"]))


def _run_child(request: dict[str, Any]) -> None:
    """Be the command line. Never returns."""
    folder, fault = Path(request["folder"]), request["fault"]
    for name, descriptor in (("out", 1), ("err", 2)):
        file = os.open(folder / f"{os.getpid()}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ["HF_HOME"] = str(folder / "no-cache")
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in ((0, "r"), (1, "w"), (2, "w")))
    if not fault.get("predicts"):
        from foretune.api import planning
        from foretune.api.prediction import Predicted

        planning.predict = lambda *_: Predicted(None)
    for number in fault.get("ignored", ()):
        signal.signal(number, signal.SIG_IGN)
    faults = _Faults(fault)
    from foretune import durable
    from foretune.runtime import artifact, merge, patched_files, run_folder

    for module in (artifact, durable, merge, patched_files, run_folder):
        module.at = faults.at
    if "file_bytes" in fault:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (fault["file_bytes"], fault["file_bytes"]))
    if "own_disk" in fault:
        _mount_own_disk(Path(fault["own_disk"]))
    from foretune.cli.app import main

    try:
        main(request["arguments"])
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        if "own_disk" in fault:  # nobody else can see what lies there
            shutil.copytree(f"{fault['own_disk']}/run", folder / "run")
        os._exit(int(end.code or 0))


def _mount_own_disk(place: Path) -> None:
    """Mount a small disk that this process alone sees (user_namespaces(7), mount_namespaces(7))."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10020000):  # CLONE_NEWUSER | CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    if libc.mount(b"none", os.fsencode(place), b"tmpfs", 0, b"size=64m"):
        raise OSError(ctypes.get_errno(), "mount")


# -- the server


class _Server:
    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self.handles: dict[int, int] = {}

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        here, there = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                os.close(there)
                _run_child(request)
            except BaseException:
                import traceback

                traceback.print_exc()
            os._exit(99)
        os.close(there)
        os.read(here, 1)  # ends when the child has a group of its own
        os.close(here)
        self.handles[pid] = os.pidfd_open(pid)
        return {"pid": pid}

    def _has_ended(self, pid: int, seconds: float) -> bool:
        return bool(select.select([self.handles[pid]], [], [], seconds)[0])

    def signal(self, request: dict[str, Any]) -> dict[str, Any]:
        if not self._has_ended(request["pid"], request["after"]):
            (os.killpg if request["group"] else os.kill)(request["pid"], request["number"])
        return {}

    def wait_for(self, request: dict[str, Any]) -> dict[str, Any]:
        path = Path(request["path"])
        while not path.exists():
            if self._has_ended(request["pid"], 0.002):
                break
        return {"is_there": path.exists()}

    def wait(self, request: dict[str, Any]) -> dict[str, Any]:
        pid = request["pid"]
        if not self._has_ended(pid, SECONDS):
            os.killpg(pid, signal.SIGKILL)
            return {"failed": f"{pid} did not end in {SECONDS} seconds"}
        _, status = os.waitpid(pid, 0)
        os.close(self.handles.pop(pid))
        code = os.waitstatus_to_exitcode(status)
        return {"code": code if code >= 0 else 128 - code}


def _import_everything() -> None:
    import torch

    torch.set_num_threads(1)
    import peft  # noqa: F401
    import ruamel.yaml  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import foretune.api.evaluation
    import foretune.api.merging
    import foretune.api.runs
    import foretune.cli.app
    import foretune.cli.merge
    import foretune.cli.train
    import foretune.runtime.preflight
    import foretune.runtime.qualify
    import foretune.runtime.stops
    import foretune.runtime.train  # noqa: F401


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not stand among the answers
    _import_everything()
    gc.collect()
    gc.freeze()  # a child's collector would touch, and so copy, everything that was imported
    server = _Server()
    for line in sys.stdin:
        request = json.loads(line)
        call: Callable[[dict[str, Any]], dict[str, Any]] = getattr(server, request["do"])
        print(json.dumps(call(request)), file=answers, flush=True)
    for pid in server.handles:  # a test that failed may have left a child that was stopped
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
