"""Pages for people: one HTML file each that needs nothing else. No script, and a policy that forbids any."""

import html
from collections.abc import Iterable, Sequence

from specrt.svg import Series

# The colours of Okabe and Ito (2008), which people with any kind of colour vision tell apart.
ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7"
GREY = "#8a929c"
PHASES = {"draft": ORANGE, "verify": BLUE, "rest": GREY}

_BIDI = {chr(c) for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}  # would reorder the text around them
_STYLE = """
:root { --ink: #1c2430; --soft: #59636f; --line: #d9dee5; --panel: #f6f8fa; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 22px; margin: 0 0 2px; }
h2 { font-size: 16px; margin: 28px 0 6px; }
p { margin: 4px 0; }
.soft { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 8px; margin: 16px 0 8px; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 6px 12px; }
.tile b { display: block; font-size: 19px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 12px; }
.hint { border-left: 4px solid #d55e00; background: #fdf1ea; padding: 6px 12px; margin: 8px 0; font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; margin: 4px 0; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 5px;
  vertical-align: -1px; }
svg { display: block; max-width: 100%; height: auto; }
svg text { font-size: 11px; fill: #59636f; font-family: inherit; }
"""


def page(title: str, body: str, *, style: str) -> str:
    """Return a whole page; `title` is text, `body` and `style` are HTML and CSS."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{shown(title)}</title>\n'
        f"<style>{_STYLE}{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def shown(text: str) -> str:
    """Return text as HTML that shows all of it; what would not be seen, line ends among it, has a sign."""
    return html.escape("".join(map(_visible, text)))


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return what colours mean: pairs of colour and text."""
    items = "".join(f'<span><i style="background: {colour}"></i>{shown(text)}</span>' for colour, text in entries)
    return f'<div class="legend">{items}</div>'


def mixed(colour: str, white: float) -> str:
    """Return a colour with a share of white in it."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def series_legend(series: Sequence[Series]) -> str:
    """Return the legend of a chart."""
    return legend((one.colour, one.name) for one in series)


def tiles(facts: Iterable[tuple[str, str]]) -> str:
    """Return pairs of value and meaning as tiles."""
    items = "".join(f'<div class="tile"><b>{shown(value)}</b><span>{shown(name)}</span></div>' for value, name in facts)
    return f'<div class="tiles">{items}</div>'


def _visible(character: str) -> str:
    if character == "\n":
        return "\u23ce\n"
    if character == "\t":
        return "\u21e5\t"
    if character in _BIDI or "\x80" <= character < "\xa0":
        return f"\u2039U+{ord(character):04X}\u203a"
    if character < " " or character == "\x7f":
        return chr(0x2421 if character == "\x7f" else 0x2400 + ord(character))
    return character
