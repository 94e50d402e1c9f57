"""Small charts as SVG: bars side by side, bars on top of each other, and lines, over one axis that begins at 0."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 22, 26
_CHARACTER = 6.2  # pixels, of a label
_GAP = 8  # pixels, between labels
_WIDEST = 56  # pixels, of a bar
_SLANTED = 40  # labels; more of them stand upright, some left out


@dataclass(frozen=True, slots=True)
class Series:
    """A value per label, None where there is none, under one name and colour."""

    name: str
    colour: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class _Frame:
    """The plane of a chart: `count` slots beside each other, values up to `top`."""

    width: float
    height: float
    bottom: float
    count: int
    top: float

    @property
    def slot(self) -> float:
        return (self.width - _LEFT - _RIGHT) / max(1, self.count)

    def x(self, place: float) -> float:
        return _LEFT + place * self.slot

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - _TOP) * value / self.top


def bars(labels: Sequence[str], series: Sequence[Series], *, unit: str, width: float, height: float = 260) -> str:
    """Return a chart with a group of bars for each label, a bar of each series in it."""
    frame = _frame(labels, [v for one in series for v in one.values if v is not None], width, height)
    size = min(_WIDEST, frame.slot * 0.84 / max(1, len(series)))
    labelled = all(size >= _CHARACTER * len(_short(v)) for one in series for v in one.values if v is not None)
    parts = []
    for place, label in enumerate(labels):
        start = frame.x(place + 0.5) - size * len(series) / 2
        for order, one in enumerate(series):
            value = one.values[place]
            if value is None:
                continue
            left, number = start + order * size, _number(value)
            parts.append(_bar(frame, left, size, (0.0, value), one.colour, f"{label}, {one.name}: {number} {unit}"))
            if labelled:
                parts.append(_text(left + size / 2, frame.y(value) - 4, _short(value)))
    return _chart(frame, labels, unit, parts)


def stacked(labels: Sequence[str], series: Sequence[Series], *, unit: str, width: float, height: float = 260) -> str:
    """Return a chart with a bar for each label that is made of a piece of each series."""
    totals = [sum(one.values[place] or 0.0 for one in series) for place in range(len(labels))]
    frame = _frame(labels, totals, width, height)
    size = min(_WIDEST, frame.slot * 0.84)
    parts = []
    for place, label in enumerate(labels):
        said = ", ".join(f"{one.name} {_number(one.values[place] or 0.0)} {unit}" for one in series)
        below = 0.0
        for one in series:
            value = one.values[place] or 0.0
            left = frame.x(place + 0.5) - size / 2
            parts.append(_bar(frame, left, size, (below, below + value), one.colour, f"{label}: {said}"))
            below += value
    return _chart(frame, labels, unit, parts)


def lines(labels: Sequence[str], series: Sequence[Series], *, unit: str, width: float, height: float = 260) -> str:
    """Return a chart with a line for each series; a value that is None ends it."""
    frame = _frame(labels, [v for one in series for v in one.values if v is not None], width, height)
    parts = []
    for one in series:
        points = [(frame.x(p + 0.5), frame.y(v), labels[p], v) for p, v in enumerate(one.values) if v is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{one.colour}" stroke-width="2"/>')
        for x, y, label, value in points:
            said = html.escape(f"{one.name}, {label}: {_number(value)} {unit}")
            dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{one.colour}">'
            parts.append(f"{dot}<title>{said}</title></circle>")
    return _chart(frame, labels, unit, parts)


def _frame(labels: Sequence[str], values: Sequence[float], width: float, height: float) -> _Frame:
    slot = (width - _LEFT - _RIGHT) / max(1, len(labels))
    longest = max((len(label) for label in labels), default=0) * _CHARACTER
    slanted = longest + _GAP > slot and len(labels) <= _SLANTED
    bottom = height - (0.6 * longest + 20 if slanted else _BOTTOM)
    return _Frame(width, height, bottom, len(labels), max([*values, 0.0]) or 1.0)


def _text(x: float, y: float, text: str, *, anchor: str = "middle", slanted: bool = False) -> str:
    turn = f' transform="rotate(-35 {x:.1f} {y:.1f})"' if slanted else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{html.escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _bar(frame: _Frame, left: float, size: float, ends: tuple[float, float], colour: str, said: str) -> str:
    low, high = frame.y(ends[0]), frame.y(ends[1])
    place = f'x="{left:.1f}" y="{high:.1f}" width="{max(1.0, size - 1):.1f}" height="{low - high:.1f}"'
    return f'<rect {place} fill="{colour}"><title>{html.escape(said)}</title></rect>'


def _chart(frame: _Frame, labels: Sequence[str], unit: str, parts: Sequence[str]) -> str:
    """Return the picture: grid and ticks, then `parts`, then labels, as many as there is room for."""
    grid = [_text(_LEFT, 12, unit, anchor="start")]
    for tick in ticks(frame.top):
        y = frame.y(tick)
        grid.append(f'<line x1="{_LEFT}" x2="{frame.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e7ec"/>')
        grid.append(_text(_LEFT - 6, y + 4, f"{tick:g}", anchor="end"))
    slanted = frame.bottom < frame.height - _BOTTOM
    longest = max((len(label) for label in labels), default=0) * _CHARACTER
    every = 1 if slanted else max(1, math.ceil((longest + _GAP) / frame.slot))
    anchor = "end" if slanted else "middle"
    below = [
        _text(frame.x(place + 0.5), frame.bottom + 16, labels[place], anchor=anchor, slanted=slanted)
        for place in range(0, len(labels), every)
    ]
    size = f'width="{frame.width:g}" height="{frame.height:g}" viewBox="0 0 {frame.width:g} {frame.height:g}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{"".join([*grid, *parts, *below])}</svg>'


def ticks(top: float) -> list[float]:
    """Return 0 and up to five round numbers up to `top` > 0."""
    power = 10.0 ** math.floor(math.log10(top / 5))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if top / (factor * power) <= 5.01)
    return [step * n for n in range(math.floor(top / step + 1e-9) + 1)]
