"""What every SVG file shares: a frame with words for who cannot see it, colours, and text at a place."""

from foretune.texts import text_of

__all__ = ["COLORS", "STACKED", "STYLE", "framed", "label"]

# From the Observable 10 palette, whose hues are told apart on white and on black; order and legend say the same.
COLORS = {
    "weights": "#4269d0",
    "adapters": "#6cc5b0",
    "gradients": "#ff725c",
    "optimizer states": "#a463f2",
    "activations": "#3ca951",
    "logits and loss": "#efb118",
    "workspaces": "#9c6b4e",
}
STACKED = ("weights", "adapters", "optimizer states", "gradients", "activations", "logits and loss", "workspaces")
"""The order in which components are stacked, in every picture."""

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1b1e23; }
.head { font-size: 16px; font-weight: 600; }
.dim { fill: #5a6270; }
.paper { fill: #ffffff; }
.band { fill: #eef0f3; }
.grid { stroke: #c9ced6; stroke-width: 0.5; }
.line { fill: none; stroke: #1b1e23; stroke-width: 1.5; }
.card { stroke: #c2261b; stroke-width: 2; stroke-dasharray: 8 4; }
.need { stroke: #1b1e23; stroke-width: 1; stroke-dasharray: 2 3; }
.halo { paint-order: stroke; stroke: #ffffff; stroke-width: 4; stroke-linejoin: round; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8eaed; }
  .dim { fill: #a3abb8; }
  .paper { fill: #15171b; }
  .band { fill: #20242a; }
  .grid { stroke: #434a55; }
  .line, .need { stroke: #e8eaed; }
  .card { stroke: #ff6b5e; }
  .halo { stroke: #15171b; }
}
"""


def framed(body: str, *, width: int, height: int, title: str, description: str) -> str:
    """Return the text of an SVG file that needs nothing else, light or dark as its reader's screen is."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-labelledby="title description">\n<title id="title">{text_of(title)}</title>\n'
        f'<desc id="description">{text_of(description)}</desc>\n<style>{STYLE}</style>\n'
        f'<rect class="paper" width="{width}" height="{height}"/>\n{body}\n</svg>\n'
    )


def label(x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> str:
    """Write a text at a place."""
    named = f' class="{kind}"' if kind else ""
    placed = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{named}{placed} x="{x:.1f}" y="{y:.1f}">{text_of(text)}</text>'
