"""The site is strict: what leads nowhere, or is loaded from elsewhere, is an error. (`make lint` builds it.)"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_script", ROOT / "scripts/site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[there](nowhere.md)", "nowhere.md"),
        ("[there](index.md#no-such-heading)", "no-such-heading"),
        ("[there](#no-such-heading)", "no-such-heading"),
    ],
)
def test_a_link_that_leads_nowhere_is_an_error(line: str, why: str, site: ModuleType, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    (docs / "site").mkdir(parents=True)
    text = (ROOT / "docs/conf.py").read_text().replace("NAVIGATION = {", "NAVIGATION = {} and {")
    (docs / "conf.py").write_text(text)
    (docs / "site/site.css").write_text("")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (docs / "index.md").write_text(f"# Title\n\n{line}\n")
    words = [sys.executable, "-m", "sphinx", *site.STRICT, str(docs), str(tmp_path / "built")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert why in done.stderr


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ('<script src="https://cdn.example/x.js"></script>', "page.html: it loads https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/a.css">', "page.html: it loads //fonts.example/a.css"),
        ('<img src="data:image/png;base64,AA">', None),
        ('<a href="https://example.org/">there</a>', None),
        ('<a href="other.html">there</a>', "page.html: other.html leads nowhere"),
        ('<a href="#here">there</a>', "page.html: #here leads nowhere"),
        ('<p id="here"></p><a href="page.html#here">there</a>', None),
    ],
)
def test_a_page_needs_nothing_but_the_site(html: str, problem: str | None, site: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(html)
    assert site.problems(tmp_path) == ([problem] if problem else [])
