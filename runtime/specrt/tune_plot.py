"""The plot of `specrt tune`: tokens per second of every setting, predicted and measured."""

from pathlib import Path

from specrt.engine_plot import check_plot, save
from specrt.tune import TuneReport

__all__ = ["check_plot", "write_plot"]


def write_plot(report: TuneReport, path: Path) -> None:
    """Write a report as a picture; raises `RequestError` if the file cannot be written."""
    from matplotlib.figure import Figure

    rows = report.rows[::-1]
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh(places, [row.predicted or 0.0 for row in rows], color="C0", alpha=0.4, label="predicted by replay")
    measured = [(place, row.measured) for place, row in zip(places, rows, strict=True) if row.measured is not None]
    axes.plot([rate for _, rate in measured], [place for place, _ in measured], "D", color="C3", label="measured")
    axes.set_yticks(places, [str(row.setting) for row in rows])
    axes.set(xlabel="tokens per second", title=f"best here: {report.choice}")
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)
