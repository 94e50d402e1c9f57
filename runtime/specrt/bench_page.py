"""The page of `specrt bench --report`: what was measured, as charts and as a table."""

from collections.abc import Callable, Sequence

from specrt.bench import PLAIN, PLAIN_ONE, BenchRow
from specrt.page import BLUE, GREEN, ORANGE, PHASES, PURPLE, SKY, VERMILLION, mixed, page, series_legend, shown, tiles
from specrt.svg import Series, bars, lines, stacked

_COLOURS = (GREEN, BLUE, VERMILLION, PURPLE, ORANGE)
_PALEST = 0.65  # share of white
_PLAIN_COLOURS = {PLAIN_ONE: "#59636f", PLAIN: "#b4bbc4"}
_WIDTH, _HALF = 1120, 540  # pixels
_STYLE = """
.two { display: grid; grid-template-columns: 1fr 1fr; column-gap: 40px; }
@media (max-width: 960px) { .two { display: block; } }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 3px 8px; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
tr.first td { border-top: 2px solid #aab3bd; }
"""


def bench_page(rows: Sequence[BenchRow], facts: Sequence[str]) -> str:
    """Return the page of the rows of `run_bench`; `facts` say in words what was measured, and on what."""
    every = [row for row in rows if row.category == "all"]
    colours = _colours(every)
    measured = _by_category(rows, every, colours)
    positions = _by_position(every, colours)
    body = [
        "<h1>Plain and speculative decoding</h1>",
        *(f'<p class="soft">{shown(fact)}</p>' for fact in facts),
        _best(every),
        _hints(every),
        "<h2>Tokens per second by category</h2>",
        series_legend(measured),
        bars(_categories(rows), measured, unit="tokens/s", width=_WIDTH),
        '<div class="two"><div>',
        "<h2>Accepted by position of the guess</h2>",
        series_legend(positions),
        lines(_numbers(positions), positions, unit="% of the guesses there", width=_HALF),
        "</div><div>",
        "<h2>Where the time of a token goes</h2>",
        *_chart(stacked, every, _phases(every), unit="ms per token"),
        "</div></div>",
        *_predicted(every),
        "<h2>All numbers</h2>",
        _table(rows),
    ]
    return page("SpecRT bench", "\n".join(body), style=_STYLE)


def _best(every: Sequence[BenchRow]) -> str:
    best = max(every, key=lambda row: row.tokens_per_s)
    base = next(row for row in every if row.setting == PLAIN_ONE)
    facts = [
        (f"{best.tokens_per_s:.1f} tokens/s", f"the fastest setting, {best.setting}"),
        (f"{best.speedup:.2f} x", f"over {PLAIN_ONE}, which gives {base.tokens_per_s:.1f} tokens/s"),
        (f"{best.block_efficiency:.2f}", "tokens per step (block efficiency)"),
        (f"{best.acceptance_rate:.0%}", "of its proposed tokens accepted"),
    ]
    return tiles(facts)


def _hints(every: Sequence[BenchRow]) -> str:
    hints = [shown(f"{row.setting}: {text}") for row in every for text in row.remarks]
    return f'<p class="hint">{"<br>".join(hints)}</p>' if hints else ""


def _chart(
    draw: Callable[..., str], rows: Sequence[BenchRow], series: Sequence[Series], *, unit: str, width: float = _HALF
) -> list[str]:
    return [series_legend(series), draw([row.setting for row in rows], series, unit=unit, width=width)]


def _by_category(rows: Sequence[BenchRow], every: Sequence[BenchRow], colours: dict[str, str]) -> list[Series]:
    rates = {(row.category, row.setting): row.tokens_per_s for row in rows}
    return [
        Series(s.setting, colours[s.setting], tuple(rates[name, s.setting] for name in _categories(rows)))
        for s in every
    ]


def _by_position(every: Sequence[BenchRow], colours: dict[str, str]) -> list[Series]:
    most = max(len(row.acceptance_by_position) for row in every)
    found = []
    for row in every:
        shares = [100 * share for share in row.acceptance_by_position]
        if shares:
            found.append(Series(row.setting, colours[row.setting], (*shares, *[None] * (most - len(shares)))))
    return found


def _numbers(series: Sequence[Series]) -> list[str]:
    return [str(n) for n in range(1, len(series[0].values) + 1)] if series else []


def _phases(every: Sequence[BenchRow]) -> list[Series]:
    columns = {
        "draft": [row.draft_s for row in every],
        "verify": [row.verify_s for row in every],
        "rest": [row.rest_s for row in every],
    }
    return [Series(name, colour, tuple(1e3 * s for s in columns[name])) for name, colour in PHASES.items()]


def _predicted(every: Sequence[BenchRow]) -> list[str]:
    """Return the chart that compares replay and measurement, if there was a replay."""
    rows = [row for row in every if row.predicted is not None]
    if not rows:
        return []
    series = [
        Series("predicted by replay, from the time of calls alone", SKY, tuple(row.predicted for row in rows)),
        Series("measured", BLUE, tuple(row.tokens_per_s for row in rows)),
    ]
    head = "<h2>Predicted and measured</h2>"
    return [head, *_chart(bars, rows, series, unit="tokens/s", width=_WIDTH)]


def _table(rows: Sequence[BenchRow]) -> str:
    names = [
        "category", "setting", "tokens/s", "speedup", "over plain", "block eff.", "accepted", "draft cost", "rest",
        "spread", "predicted",
    ]  # fmt: skip
    parts = ["<table><tr>", *(f"<th>{name}</th>" for name in names), "</tr>"]
    before = None
    for row in rows:
        cells = [
            row.category, row.setting, f"{row.tokens_per_s:.1f}", f"{row.speedup:.2f} x", f"{row.over_plain:.2f} x",
            f"{row.block_efficiency:.2f}", f"{row.acceptance_rate:.0%}", f"{row.draft_cost_ratio:.3f}",
            f"{row.rest:.1%}", f"{row.spread:.0%}", "" if row.predicted is None else f"{row.predicted:.1f}",
        ]  # fmt: skip
        first = ' class="first"' if before not in (None, row.category) else ""
        before = row.category
        parts += [f"<tr{first}>", *(f"<td>{shown(cell)}</td>" for cell in cells), "</tr>"]
    return "".join([*parts, "</table>"])


def _categories(rows: Sequence[BenchRow]) -> list[str]:
    return list(dict.fromkeys(row.category for row in rows))


def _colours(every: Sequence[BenchRow]) -> dict[str, str]:
    """Return a colour for each setting: one per drafter, the paler the earlier its k."""
    found = dict(_PLAIN_COLOURS)
    drafters = list(dict.fromkeys(row.drafter for row in every if row.drafter))
    for number, drafter in enumerate(drafters):
        names = [row.setting for row in every if row.drafter == drafter]
        for place, name in enumerate(names):
            pale = _PALEST * (len(names) - 1 - place) / max(1, len(names) - 1)
            found[name] = mixed(_COLOURS[number % len(_COLOURS)], pale)
    return found
