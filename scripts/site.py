"""Build the pages of docs/ into build/site, strictly, and check that they need nothing but themselves.

    python scripts/site.py

Sphinx says of a page that is in no table of contents, or of a link to a page or a heading that does not exist, that it
is an error. Of what was built, each page must load its own files alone (it works from a folder, without a network), and
each of its links into the site must lead somewhere.
"""

import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build/site"
STRICT = ("-b", "html", "-E", "-W", "--keep-going", "-n", "-q")
"""Everything anew; a warning is an error, and so is a reference that is not found."""
LOADING = {"src", "srcset", "data", "poster", "action"}
"""Attributes by which a page loads what it names; `href` does so in a `link` only."""


class Page(HTMLParser):
    """What a page loads, where it links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: set[str] = set()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Sort the attributes of a tag."""
        for name, value in attrs:
            if not value:
                continue
            if name in LOADING or (name, tag) == ("href", "link"):
                self.loaded.add(value)
            elif name == "href":
                self.links.add(value)
            elif name == "id":
                self.anchors.add(value)


def build() -> int:
    """Build the site from nothing; returns Sphinx's exit status."""
    shutil.rmtree(SITE, ignore_errors=True)
    words = [sys.executable, "-m", "sphinx", *STRICT, "-d", str(ROOT / "build/doctrees"), str(ROOT / "docs"), str(SITE)]
    return subprocess.run(words, check=False).returncode


def problems(site: Path) -> list[str]:
    """Return what is wrong with a built site: what it loads from elsewhere, and links that lead nowhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        found += [f"{path.relative_to(site)}: it loads {url}" for url in foreign(page.loaded)]
        found += [
            f"{path.relative_to(site)}: {link} leads nowhere" for link in page.links if is_dead(link, path, pages)
        ]
    for style in sorted(site.rglob("*.css")):
        text = style.read_text(encoding="utf-8")
        if any(mark in text for mark in ("url(http", "url(//", "@import")):
            found.append(f"{style.relative_to(site)}: it loads something from elsewhere")
    return found


def foreign(urls: set[str]) -> list[str]:
    """Return the addresses that lie outside the site."""
    return sorted(url for url in urls if urlsplit(url).scheme not in ("", "data") or url.startswith("//"))


def is_dead(link: str, path: Path, pages: dict[Path, Page]) -> bool:
    """Whether a link into the site has no page, or no heading, at its end."""
    if urlsplit(link).scheme:
        return False
    address, anchor = urldefrag(link)
    target = (path.parent / unquote(urlsplit(address).path)).resolve() if address else path
    if target not in pages:
        return not target.is_file()
    return bool(anchor) and unquote(anchor) not in pages[target].anchors


def main() -> int:
    """Build and check. Returns 1 where anything is wrong."""
    if build():
        return 1
    found = problems(SITE)
    print("\n".join(found) or f"Built: {SITE.relative_to(ROOT)}/index.html")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
