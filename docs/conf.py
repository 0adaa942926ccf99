"""How the pages become a site: `make site` (scripts/site.py) builds build/site, and any warning is an error.

The pages are plain Markdown that reads everywhere; what the site adds stands here. See docs/architecture.md, section 8.
"""

import tomllib
from pathlib import Path
from typing import Any

from pygments.lexer import RegexLexer, bygroups
from pygments.lexers.data import JsonLexer
from pygments.token import Generic, Text

NAVIGATION = {
    "Start": ("quickstart",),
    "Planning": ("numbers", "memory"),
    "Data": ("data",),
    "Training": ("training", "import"),
    "Accuracy": ("evidence", "accuracy", "observations"),
    "Help": ("troubleshooting", "doctor", "cases"),
    "Reference": ("cli", "python", "settings", "rules", "events"),
    "Design": ("design", "Architecture <architecture>", "comparison"),
}
"""What stands beside every page, by heading. A page that is missing here is a warning, and so an error."""

_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = _PROJECT["name"]
release = _PROJECT["version"]
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["predictions"]
nitpicky = True
show_warning_types = True

myst_heading_anchors = 3
myst_enable_extensions: list[str] = []
suppress_warnings: list[str] = []
highlight_language = "text"

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # it is fetched page by page, which a browser forbids for files
html_last_updated_fmt = None  # the same pages give the same site
html_static_path = ["site"]
html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {
        "font-stack": "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'Liberation Sans', sans-serif",
        "font-stack--monospace": "ui-monospace, 'Cascadia Mono', 'DejaVu Sans Mono', 'Liberation Mono', monospace",
    },
}


class Console(RegexLexer):
    """Commands after `$ `, and what they print as it is: apostrophes there begin no string of a shell."""

    name = "console"
    tokens = {"root": [(r"^(\$ )(.*\n)", bygroups(Generic.Prompt, Generic.Strong)), (r".*\n", Text)]}  # noqa: RUF012


def _add_navigation(app: Any, name: str, source: list[str]) -> None:
    """Put the table of contents below the first page, where a plain Markdown viewer would show it as code."""
    if name == "index":
        source[0] += "".join(
            f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{chr(10).join(pages)}\n```\n"
            for heading, pages in NAVIGATION.items()
        )


def setup(app: Any) -> None:
    """Tell Sphinx what the pages do not hold themselves."""
    app.connect("source-read", _add_navigation)
    app.add_lexer("console", Console)
    app.add_lexer("jsonl", JsonLexer)
