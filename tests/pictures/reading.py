"""What a page of HTML holds, read by parsers: its elements, its texts, its bars."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

VOID = {"br", "hr", "img", "meta", "link", "input"}
SVG = "{http://www.w3.org/2000/svg}"


class Page(HTMLParser):
    """A fragment of HTML: refuses elements that are left open or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def bars(text: str) -> list[ET.Element]:
    """Return the SVG elements of a page, parsed as XML."""
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def parts(bar: ET.Element) -> dict[str, float]:
    """Return the widths of a bar's parts, by what their title says they are."""
    rects = [rect for rect in bar.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    return {str(rect.find(f"{SVG}title").text).partition(":")[0]: float(rect.attrib["width"]) for rect in rects}  # type: ignore[union-attr]


def require_harmless(text: str) -> Page:
    """Refuse a page that runs something, fetches something, or changes what is around it."""
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert tags <= {
        "div", "span", "ul", "li", "details", "summary", "table", "caption", "thead", "tbody", "tr", "th", "td",
        "svg", "title", "desc", "rect", "line",
    }  # fmt: skip
    for _, attributes in page.elements:
        assert not {"id", "class", "href", "src", "xlink:href"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
        assert "url(" not in (attributes.get("style") or "")
    assert text.count("http") == text.count('xmlns="http://www.w3.org/2000/svg"')
    for bar in bars(text):
        assert bar.find(f"{SVG}title") is not None
        assert bar.find(f"{SVG}desc") is not None
    return page
