"""`specrt tune`."""

import json
from pathlib import Path
from typing import Any

import click

from specrt import cli_options as options


@click.command(epilog="""\b
Examples:
  specrt tune artifacts/smollm2-135m
  specrt tune artifacts/smollm2-135m --prompts mine.jsonl --max-step-ms 50 --dry-run --json""")  # fmt: skip
@options.artifact
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON lines with 'turns' or 'prompt', and 'category'.")
@click.option("--limit", type=click.IntRange(min=1), help="Prompts per category.")
@click.option("--drafter", "drafters", multiple=True, help="Try this one; repeatable.  [default: all of the artifact]")
@click.option("--max-step-ms", type=click.FloatRange(min=0, min_open=True), help="Longest step that is acceptable.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Tokens per text.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Real runs of the best few.")
@click.option("--raw", is_flag=True, help="Continue the prompts as they are, without the chat template.")
@click.option("--dry-run", is_flag=True, help="Print the choice and do not keep it.")
@click.option("--forget", is_flag=True, help="Forget the choice that was kept, and measure nothing.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw it as well, .png or .svg.")
@options.device
@options.threads
@options.as_json
def tune(
    artifact: Path, prompts: Path | None, limit: int | None, drafters: tuple[str, ...], max_step_ms: float | None,
    max_tokens: int, repeats: int, raw: bool, dry_run: bool, forget: bool, plot: Path | None, device: str | None,
    threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Find out which drafter and k are fastest here, and make them the default on this machine.

    On artifacts that take trees, drafters that can branch are tried both ways (strict: no bit changes). The choice
    is kept beside what else was measured on this machine, never in the artifact, and holds for requests that name
    neither drafter nor k.
    """
    from specrt.language_model import load
    from specrt.machine import Choice
    from specrt.prompts import load_prompts
    from specrt.speculation import runnable
    from specrt.tune import format_report, num_runs, run_tune
    from specrt.tune_plot import check_plot, write_plot

    if forget:
        options.refuse_all_but("forget", "artifact", "device", "threads")
        with load(artifact, device=device, threads=threads) as model:
            model.machine.choose(None)
        return
    if plot is not None:
        check_plot(plot)
    texts = load_prompts(prompts, limit=limit)
    given: Any = {"temperature": 0.0, "max_tokens": max_tokens}
    if max_step_ms is not None:
        given["max_step_ms"] = max_step_ms
    with load(artifact, device=device, threads=threads) as model:
        manifest = model.manifest
        names = drafters or runnable(manifest, model.target)
        trees = manifest.of_trees(names) if model.target.takes_trees else []
        shapes = [*names, *trees]
        num_live = sum(map(manifest.reads_target, shapes))
        runs = num_runs(len(texts), len(shapes) - num_live, len(model.target.verify_widths), repeats, num_live)
        with options.progress(runs) as advance:
            report = run_tune(
                model, texts, drafters=names, repeats=repeats, options=given,
                chat=model.tokenizer.has_chat_template and not raw, on_run=advance, trees=trees,
            )  # fmt: skip
        if not dry_run:
            best = report.choice
            longest = max_step_ms if best.k == "auto" else None
            model.machine.choose(Choice(drafter=best.drafter, k=best.k, max_step_ms=longest, tree=best.tree))
    page = format_report(report) if dry_run else f"{format_report(report)}\nkept in {model.machine.path}"
    click.echo(json.dumps({"artifact": str(artifact), **report.to_dict()}) if as_json else page)
    if plot is not None:
        write_plot(report, plot)
