"""Foreign text made safe to show: on one line, and as text of XML and HTML."""

__all__ = ["escape", "quoted", "text_of"]


def escape(text: str) -> str:
    """Show a foreign text on one line: whatever is not printable (ESC, newline, bidi, half a surrogate) as an escape.

    >>> escape("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def quoted(path: object) -> str:
    """Write a path so that a shell takes it as one word, and a terminal as text.

    >>> quoted("my runs/first")
    "'my runs/first'"
    """
    from shlex import quote

    return escape(quote(str(path)))


def text_of(text: str) -> str:
    """Escape for XML and HTML, between tags and inside quotes; what XML cannot hold becomes a visible escape.

    >>> text_of('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    shown = escape(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return shown.replace('"', "&quot;").replace("'", "&#39;")
