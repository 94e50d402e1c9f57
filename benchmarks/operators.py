"""Where the time of a call goes: milliseconds by operator and rows, by ONNX Runtime's own profiler (docs/engine.md).

python -m benchmarks.operators ARTIFACT --rows 1,2,10,16 --context 256

The profiler takes a few microseconds per node, so that calls are a little longer here than by 'specrt bench --engine'.
"""

import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import click

from specrt import engine_ort
from specrt.engine import open_engine
from specrt.errors import RequestError, SpecRTError
from specrt.machine import processor
from specrt_profiles.manifest import EngineSpec, read_manifest

_REST = "others"
Times = dict[str, float]  # operator -> milliseconds of a call


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--rows", default="1,2,10,16", show_default=True, help="Rows of a call, comma-separated.")
@click.option("--context", default=256, show_default=True, type=click.IntRange(0), help="Tokens in the KV buffers.")
@click.option("--calls", default=40, show_default=True, type=click.IntRange(1), help="Calls of each kind.")
@click.option("--least", default=0.1, show_default=True, help="Milliseconds of operators that get a line of their own.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; one per physical core if left out.")
def main(artifact: Path, rows: str, context: int, calls: int, least: float, threads: int | None) -> None:
    """Profile the calls of ARTIFACT's target."""
    try:
        counts = [int(count) for count in rows.split(",")]
    except ValueError:
        raise click.UsageError("expected --rows as numbers (1,10)") from None
    try:
        spec = read_manifest(artifact).target
        found = {count: profile(artifact, spec, rows=count, context=context, calls=calls, threads=threads)
                 for count in counts}  # fmt: skip
    except SpecRTError as error:
        raise click.ClickException(str(error)) from None
    click.echo(table(found, least=least))
    click.echo(f"\n{artifact.name}, medians of {calls} calls behind {context} tokens, {processor()}")


def profile(
    artifact: Path, spec: EngineSpec, *, rows: int, context: int, calls: int, threads: int | None
) -> Times:  # fmt: skip
    """Return the median milliseconds of each operator in a call of so many rows; `call` is the whole of it."""
    if not 1 <= rows <= spec.capacity - context:
        raise RequestError(f"rows: expected 1 to {spec.capacity - context} behind {context} tokens, found {rows}")
    real = engine_ort.session_options
    with tempfile.TemporaryDirectory() as folder:

        def options(threads: int | None) -> Any:
            made = real(threads)
            made.enable_profiling, made.profile_file_prefix = True, str(Path(folder) / "calls")
            return made

        with mock.patch.object(engine_ort, "session_options", options):
            engine: Any = open_engine(artifact, replace(spec, exit=None), threads=threads)  # whole, also with an exit
        try:
            engine.prefill([1] * context)
            for _ in range(calls + 1):  # the first one is not counted
                engine.rollback(context)
                engine.forward([1] * rows, context, rows)
            events = json.loads(Path(engine._session.end_profiling()).read_text("utf-8"))
        finally:
            engine.close()
    return times(events, calls)


def times(events: Sequence[dict[str, Any]], calls: int) -> Times:
    """Return medians over the last calls of a profile."""
    runs = [event for event in events if event["cat"] == "Session" and event["name"] == "model_run"][-calls:]
    by_call: list[Counter[str]] = [Counter(call=run["dur"]) for run in runs]
    kernels = [event for event in events if event["cat"] == "Node" and event["name"].endswith("_kernel_time")]
    for event in kernels:
        for run, sums in zip(runs, by_call, strict=True):
            if run["ts"] <= event["ts"] < run["ts"] + run["dur"]:
                sums[event["args"]["op_name"]] += event["dur"]
    names = {name for sums in by_call for name in sums}
    return {name: statistics.median(sums[name] for sums in by_call) / 1e3 for name in names}


def table(found: dict[int, Times], *, least: float) -> str:
    """Return a line per operator, the longest first, and a column per number of rows."""
    largest = Counter({name: max(of.get(name, 0.0) for of in found.values()) for of in found.values() for name in of})
    named = [name for name, ms in largest.most_common() if ms >= least and name != "call"]
    lines = {name: [of.get(name, 0.0) for of in found.values()] for name in named}
    lines[f"{_REST}, and between operators"] = [
        of["call"] - sum(of.get(name, 0.0) for name in named) for of in found.values()
    ]
    lines["call"] = [of["call"] for of in found.values()]
    head = f"| operator, ms | {' | '.join(f'{rows} rows' for rows in found)} |\n|---{'|---' * len(found)}|"
    return "\n".join([head, *(f"| {name} | {' | '.join(f'{v:.2f}' for v in of)} |" for name, of in lines.items())])


if __name__ == "__main__":
    main()
