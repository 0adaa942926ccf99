"""The Hub: whether there is a token (never which), whether it may be asked, and, where that was wanted, its answer."""

from collections.abc import Callable, Iterator

from foretune.errors import MissingDependencyError
from foretune.machine.report import Finding
from foretune.models.hub import HubState, is_offline, token_source

__all__ = ["hub_findings"]

_SOURCES = {"file": "in the file that `hf auth login` writes"}


def hub_findings(*, asks: Callable[[], HubState] | None = None) -> Iterator[Finding]:
    """Say whether models of the Hub can be had. `asks` is called where the Hub is to be asked; None: it is not."""
    yield _token(token_source())
    offline = is_offline()
    yield Finding(
        check="hub.offline",
        group="Hub",
        state="ok",
        found="offline: the environment forbids to ask the Hub" if offline else "the environment allows to ask the Hub",
        advice="Models must be in the catalogue, the cache or a folder." if offline else None,
        run=("unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE",) if offline else (),
    )
    if asks is not None:
        yield _answer(asks, offline=offline)


def _token(source: str | None) -> Finding:
    if source is None:
        return Finding(
            check="hub.token",
            group="Hub",
            state="missing",
            found="a token of the Hub",
            advice="Public models need none; for gated and private ones log in.",
            run=("hf auth login",),
        )
    where = _SOURCES.get(source, f"in {source}")
    return Finding(check="hub.token", group="Hub", state="ok", found=f"there is a token, {where} (never shown)")


def _answer(asks: Callable[[], HubState], *, offline: bool) -> Finding:
    if offline:
        found, advice = "it was not asked: the environment is offline", None
        return Finding(check="hub.answer", group="Hub", state="unknown", found=found, advice=advice)
    try:
        state = asks()
    except MissingDependencyError:
        found = "it was not asked: huggingface_hub is not installed"
        return Finding(check="hub.answer", group="Hub", state="unknown", found=found)
    except OSError as error:
        return Finding(
            check="hub.answer",
            group="Hub",
            state="problem",
            found=f"it does not answer ({type(error).__name__})",
            advice="Check the network and its proxy; models of the catalogue can be planned for without it.",
            run=("foretune models list",),
            needed_for="some settings",
        )
    if state.status == 200:
        found = f"it answers{', and takes the token' if state.had_token else ''}"
        return Finding(check="hub.answer", group="Hub", state="ok", found=found)
    if state.status == 401 and state.had_token:
        return Finding(
            check="hub.answer",
            group="Hub",
            state="problem",
            found="it answers, and does not take the token (HTTP 401)",
            run=("hf auth login",),
            needed_for="some settings",
        )
    found = f"it answers with HTTP {state.status}"
    advice = "Try again later."
    return Finding(
        check="hub.answer", group="Hub", state="problem", found=found, advice=advice, needed_for="some settings"
    )
