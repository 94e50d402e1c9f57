"""`specrt bench`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrt import cli_options as options

if TYPE_CHECKING:
    from specrt.bench import BenchRow
    from specrt.language_model import LanguageModel


@click.command(epilog="""\b
Examples:
  specrt bench artifacts/smollm2-135m
  specrt bench artifacts/smollm2-135m --prompts prompts.jsonl --ks 5,auto --drafter suffix --drafter model --json
  specrt bench artifacts/smollm2-135m --ks auto,3,9 --report report
  specrt bench artifacts/smollm2-135m --engine --plot calls.png""")  # fmt: skip
@options.artifact
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON lines with 'turns' or 'prompt', and 'category'.")
@click.option("--limit", type=click.IntRange(min=1), help="Prompts per category.")
@click.option(
    "--ks", metavar="K,...", callback=options.parse_ks, help="Values of k; -k for a single one.  [default: 3,5,9]"
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    help="Runs per prompt and setting, or rounds over all calls.  [default: 3, with --engine 9]",
)
@click.option("--raw", is_flag=True, help="Continue the prompts as they are, without the chat template.")
@click.option(
    "--engine", is_flag=True, help="Measure calls of the engines instead, and what speculation has to bring in."
)
@click.option(
    "--context",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --engine: tokens in the KV buffers where rows are compared.  [default: 256, at most half the capacity]",
)
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="With --engine: draw it as well, .png or .svg."
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Draw it as well, on a page DIR/index.html, beside what replays of the texts predict.",
)
@click.option("--drafter", multiple=True, help="Measure this one; repeatable.  [default: all of the artifact]")
@options.settings
@options.device
@options.threads
@options.as_json
def bench(
    artifact: Path, prompts: Path | None, limit: int | None, ks: list[Any], repeats: int | None, raw: bool,
    engine: bool, context: int | None, plot: Path | None, report: Path | None, device: str | None, threads: int | None,
    as_json: bool,
    **sampling: Any,
) -> None:  # fmt: skip
    """Compare plain decoding and drafters at several k on a prompt file (a small built-in set if none is given).

    plain-1 decodes with calls of width 1, the fastest plain decoding, and is what speedups refer to; plain is the
    loop without proposals. 128 tokens per prompt unless --max-tokens says otherwise. With --tree, drafters that can
    propose trees are measured both ways.
    """
    if engine:
        options.refuse_all_but("engine", "artifact", "repeats", "context", "plot", "threads", "as_json")
        _bench_engine(artifact, context, plot, repeats=repeats or 9, threads=threads, as_json=as_json)
        return
    if context is not None or plot is not None:
        raise click.UsageError(f"{'--plot' if context is None else '--context'} needs --engine")
    from specrt.bench import format_table, num_runs, run_bench
    from specrt.language_model import load
    from specrt.output import check_folder
    from specrt.prompts import load_prompts
    from specrt.speculation import runnable

    given: Any = {"max_tokens": 128, **options.given(sampling)}
    if ks and "k" in given:
        raise click.UsageError("give --ks or -k, not both")
    if "suffix_cache" in given:
        raise click.UsageError("--suffix-cache would draft every repeat from the run before: leave it out")
    if report is not None:
        check_folder(report, what="report")
    repeats = repeats or 3
    ks = ks or ([given.pop("k")] if "k" in given else [3, 5, 9])
    texts = load_prompts(prompts, limit=limit)
    with load(artifact, device=device, threads=threads) as model:
        drafters = given.pop("drafter", runnable(model.manifest, model.target))
        trees = (model.manifest.of_trees(drafters) or drafters) if given.pop("tree", False) else []
        with options.progress(num_runs(len(texts), drafters, ks, repeats, trees)) as advance:
            rows = run_bench(
                model, texts, drafters=drafters, ks=ks, repeats=repeats, options=given,
                chat=model.tokenizer.has_chat_template and not raw, on_run=advance, predict=report is not None,
                trees=trees,
            )  # fmt: skip
    found = {"artifact": str(artifact), "repeats": repeats, "rows": [asdict(row) for row in rows]}
    click.echo(json.dumps(found) if as_json else f"{repeats} repeats\n\n{format_table(rows)}")
    if report is not None:
        _write_report(report, rows, model, f"{len(texts)} prompts, {repeats} repeats", threads=threads)


def _write_report(
    folder: Path, rows: "Sequence[BenchRow]", model: "LanguageModel", amount: str, *, threads: int | None
) -> None:
    """Write the page, and nothing else, to a folder."""
    from specrt.bench_page import bench_page
    from specrt.machine import processor
    from specrt.output import make_folder, write_output

    target = model.manifest.target
    what = f"{target.model.name} at {target.precision}: {amount}"
    where = f"{processor()}, {f'{threads} threads' if threads else 'a thread per core'}, {model.target.platform}"
    make_folder(folder, what="report")
    write_output(folder / "index.html", bench_page(rows, [what, where]), what="report")


def _bench_engine(
    artifact: Path, context: int | None, plot: Path | None, *, repeats: int, threads: int | None, as_json: bool
) -> None:
    """Measure the engines; print a table or JSON and draw the plot."""
    from specrt.engine_bench import num_rounds, run_engine_bench
    from specrt.engine_costs import format_report
    from specrt.engine_plot import check_plot, write_plot
    from specrt.language_model import load

    if plot is not None:
        check_plot(plot)
    with load(artifact, threads=threads) as model, options.progress(num_rounds(repeats)) as advance:
        report = run_engine_bench(model, threads=threads, context=context, repeats=repeats, on_round=advance)
    click.echo(json.dumps({"artifact": str(artifact), **asdict(report)}) if as_json else format_report(report))
    if plot is not None:
        write_plot(report, plot)
