"""The plot of `specrt bench --engine`: time of a call against rows and against context length."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from specrt.engine_costs import CallCost, EngineReport
from specrt.errors import RequestError
from specrt.output import check_output
from specrt_profiles.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ENDINGS = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raise `RequestError` or `MissingExtraError` where `write_plot` could not write to `path`."""
    if path.suffix.lower() not in _ENDINGS:
        raise RequestError(f"plot: expected a file name that ends in .png or .svg, found {path.name!r}")
    check_output(path, what="plot")
    require("bench", "matplotlib")


def write_plot(report: EngineReport, path: Path) -> None:
    """Write a report as a picture; raises `RequestError` if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    rows, context = figure.subplots(1, 2)
    _plot_rows(rows, report)
    _plot_context(context, report)
    names = ", ".join(f"{engine.name} {engine.model} at {engine.precision}" for engine in report.engines)
    figure.suptitle(f"Time of a call: {names}; {report.threads} threads", fontsize=11)
    save(figure, path)


def save(figure: "Figure", path: Path) -> None:
    """Write a figure; raises `RequestError` if the file cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise RequestError(f"plot: {path} cannot be written: {error.strerror}") from None


def _plot_rows(axes: "Axes", report: EngineReport) -> None:
    ticks: list[int] = []
    for number, engine in enumerate(report.engines):
        calls = [call for call in report.calls if (call.engine, call.context) == (engine.name, report.context)]
        ticks = [call.rows for call in calls]
        one, colour = 1e3 * calls[0].seconds, f"C{number}"
        axes.plot(ticks, _milliseconds(calls), "o-", color=colour, label=f"{engine.name}, one call")
        axes.plot(ticks, [one * n for n in ticks], ":", color=colour, label=f"{engine.name}, as many calls of 1 row")
        floors = [1e3 * call.floor_s for call in calls]
        axes.plot(ticks, floors, "--", color=colour, label=f"{engine.name}, reading at {report.gb_per_s:.0f} GB/s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xticks([], minor=True)
    axes.set(
        xlabel="rows of the call",
        ylabel="time of the call (ms)",
        title=f"Against rows, at a context of {report.context} tokens",
    )
    _finish(axes)


def _plot_context(axes: "Axes", report: EngineReport) -> None:
    for number, engine in enumerate(report.engines):
        calls = [call for call in report.calls if call.engine == engine.name]
        lengths = Counter(call.rows for call in calls)
        few = [rows for rows, count in sorted(lengths.items()) if count == max(lengths.values())]
        for style, rows in zip(("o-", "s--", "^:"), few, strict=False):
            line = sorted((call for call in calls if call.rows == rows), key=lambda call: call.context)
            label = f"{engine.name}, {rows} row{'s' if rows > 1 else ''}"
            axes.plot([call.context for call in line], _milliseconds(line), style, color=f"C{number}", label=label)
    axes.set_ylim(bottom=0)
    axes.set(
        xlabel="context (tokens in the KV buffers)", ylabel="time of the call (ms)", title="Against context length"
    )
    _finish(axes)


def _milliseconds(calls: list[CallCost]) -> list[float]:
    return [1e3 * call.seconds for call in calls]


def _finish(axes: "Axes") -> None:
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
