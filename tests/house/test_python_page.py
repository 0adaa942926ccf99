"""docs/python.md names every public function, with an example. (tests/house/test_pages.py runs the page.)"""

import inspect
import re
from pathlib import Path

import pytest

from foretune import api

PAGE = (Path(__file__).parents[2] / "docs/python.md").read_text(encoding="utf-8")
FUNCTIONS = [name for name in api.__all__ if inspect.isfunction(getattr(api, name))]


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_stands_on_the_page_with_an_example(name: str) -> None:
    assert re.search(rf"`{name}\b", PAGE), f"{name} is not explained"
    assert any(re.search(rf"\bapi\.{name}\(", block) for block in blocks()), f"{name} has no example"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_says_what_it_does_with_an_example(name: str) -> None:
    function = getattr(api, name)
    text = inspect.getdoc(function) or ""
    summary, _, rest = text.partition("\n")
    assert summary.endswith((".", ":")) or ". " in summary
    assert re.search(rf"\b{name}\(", rest), "no example"
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(each.annotation is not inspect.Parameter.empty for each in signature.parameters.values())
    assert len(str(signature)) < 2500, "a default is shown whole"


def test_the_page_names_nothing_that_is_not_public() -> None:
    named = set(re.findall(r"\bapi\.(\w+)", " ".join(blocks())))
    assert named <= set(api.__all__)
