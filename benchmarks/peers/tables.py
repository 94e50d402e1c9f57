"""The report as Markdown tables."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.peers.results import Lane, LaneFacts, SettingRow, best


def summary_table(rows: Sequence[SettingRow], facts: Mapping[Lane, LaneFacts]) -> str:
    """Return one line per peer and precision: plain, best speculative, distance to the source, size."""
    head = (
        "peer", "weights", "plain tokens/s", "best speculative", "speedup", "mean KL", "MB on disk", "equal tokens",
        "speculative = plain", "spread",
    )  # fmt: skip
    return _table(head, (_summary(lane, fact, rows) for lane, fact in facts.items()))


def setting_table(rows: Sequence[SettingRow]) -> str:
    """Return one line per setting."""
    head = ("peer", "weights", "setting", "tokens/s", "spread", "equal tokens", "= own plain")
    return _table(
        head,
        (
            (row.lane.peer, row.lane.variant, str(row.setting), f"{row.tokens_per_s:.1f}", f"{row.spread:.0%}",
             f"{row.equal:.0%}", f"{row.as_plain:.0%}")
            for row in rows
        ),
    )  # fmt: skip


def category_table(rows: Sequence[SettingRow], lanes: Iterable[Lane]) -> str:
    """Return one line per peer and precision, a column per category: plain / best speculative tokens/s."""
    categories = list(dict.fromkeys(category for row in rows for category in row.by_category))
    lines = []
    for lane in lanes:
        plain, fastest = best(rows, lane)
        cells = [f"{_rate(plain, name)} / {_rate(fastest, name)}" for name in categories]
        if plain or fastest:
            lines.append((lane.peer, lane.variant, *cells))
    return _table(("peer", "weights", *categories), lines)


def notes(facts: Mapping[Lane, LaneFacts]) -> list[str]:
    """Return why lanes lack something, one line each."""
    return [f"{lane}: {note}" for lane, fact in facts.items() for note in fact.notes]


def _summary(lane: Lane, fact: LaneFacts, rows: Sequence[SettingRow]) -> tuple[str, ...]:
    plain, fastest = best(rows, lane)
    return (
        lane.peer,
        lane.variant,
        f"{plain.tokens_per_s:.1f}" if plain else "-",
        f"{fastest.tokens_per_s:.1f} ({fastest.setting})" if fastest else "-",
        f"{fastest.tokens_per_s / plain.tokens_per_s:.2f} x" if plain and fastest else "-",
        "-" if fact.kl is None else f"{fact.kl:.2g}",
        "-" if fact.num_bytes is None else f"{fact.num_bytes / 1e6:.0f}",
        f"{plain.equal:.0%}" if plain else "-",
        f"{fastest.as_plain:.0%}" if fastest else "-",
        f"{max(row.spread for row in (plain, fastest) if row):.0%}" if plain or fastest else "-",
    )


def _rate(row: SettingRow | None, category: str) -> str:
    return f"{row.by_category[category]:.0f}" if row and category in row.by_category else "-"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [head, *lines]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    padded = [" | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in (padded[0], rule, *padded[1:]))
