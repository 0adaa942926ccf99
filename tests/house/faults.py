"""What may fail while a page's commands run, each as the system, a library or a signal brings it about."""

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import PackageNotFoundError
from unittest.mock import patch

__all__ = ["FAULTS"]


@contextmanager
def _when_entered(phase: str, happens: Callable[[], None]) -> Iterator[None]:
    """Let something happen where a run enters a phase for the first time."""
    from foretune.runtime.meter import Meter

    enter, entered = Meter.enter, []

    def watched(meter: Meter, name: str) -> None:
        enter(meter, name)
        entered.append(name)
        if name == phase and entered.count(phase) == 1:
            happens()

    with patch.object(Meter, "enter", watched):
        yield


def _no_memory() -> None:
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4831838208 bytes. Error code 12 (Cannot allocate memory)"
    )


def _old_call(*_: object, **__: object) -> None:
    raise TypeError("forward() got an unexpected keyword argument 'residual'")


@contextmanager
def _library_raises() -> Iterator[None]:
    """A layer of the model that raises once the run is in its first forward, and not when its memory is predicted."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    with patch.object(LlamaMLP, "forward", LlamaMLP.forward), _when_entered("forward", lambda: _break(LlamaMLP)):
        yield


def _break(layer: type) -> None:
    layer.forward = _old_call  # type: ignore[attr-defined]


@contextmanager
def _small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200 * 1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def _without_torch() -> Iterator[None]:
    from foretune.runtime import libraries

    version = libraries.version

    def hidden(name: str) -> str:
        if name in ("torch", "peft"):
            raise PackageNotFoundError(name)
        return version(name)

    with patch.object(libraries, "version", hidden):
        yield


@contextmanager
def _another_format() -> Iterator[None]:
    """A library that makes the adapters in another format than it was asked for."""
    import torch

    from foretune.runtime import live

    attach = live.attach_adapters

    def attached(*arguments: object, **keywords: object) -> object:
        model = attach(*arguments, **keywords)  # type: ignore[arg-type]
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.data = parameter.data.to(torch.bfloat16)
        return model

    with patch.object(live, "attach_adapters", attached):
        yield


@contextmanager
def _smaller_model() -> Iterator[None]:
    """No failure: the journey in seconds, where no figure of it is shown."""
    from cli.test_quickstart import TINY

    from foretune.cli import quickstart

    with patch.object(quickstart, "MODEL_SIZES", TINY):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "memory runs out in backward": lambda: _when_entered("backward (later)", _no_memory),
    "a library raises in forward": _library_raises,
    "Ctrl-C in the second update": lambda: _when_entered("forward (later)", lambda: signal.raise_signal(signal.SIGINT)),
    "SIGTERM in the second update": lambda: _when_entered(
        "forward (later)", lambda: signal.raise_signal(signal.SIGTERM)
    ),
    "a disk that takes no more": _small_files,
    "torch is not installed": _without_torch,
    "an adapter comes out in another format": _another_format,
    "the quickstart's model is smaller": _smaller_model,
}
"""What a page may name after `with`, and what happens then."""
