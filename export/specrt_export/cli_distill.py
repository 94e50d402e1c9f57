"""`specrt distill`. The heavy libraries are imported when work begins."""

import os
import shlex
import sys
from pathlib import Path
from typing import Literal

import click

from specrt_export.cli import begin, default_cache_dir


@click.command(name="distill", epilog="""\b
Examples:
  specrt distill smollm2-135m -o heads/smollm2.safetensors
  specrt distill ./my-model --drafter eagle3 --prompts questions.jsonl -o heads/mine.safetensors
  specrt distill smollm2-135m --tokens 100000 --minutes 30 -o heads/trial.safetensors""")  # fmt: skip
@click.argument("model")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="File to write, .safetensors.")
@click.option("--drafter", type=click.Choice(["eagle", "eagle3"]), default="eagle", help="Layout.", show_default=True)
@click.option(
    "--tokens", type=click.IntRange(min=1), default=1_000_000, help="How much text MODEL writes.", show_default=True
)
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="Prompts to answer, JSON lines.  [default: MODEL's own]"
)
@click.option(
    "--work", type=click.Path(path_type=Path), help="Folder for text and checkpoints.  [default: OUT's .work]"
)
@click.option("--minutes", type=click.FloatRange(min=0), help="End after this time; the same command goes on.")
@click.option("--epochs", type=click.IntRange(min=1), help="Times the text is read.  [default: 8]")
@click.option(
    "--vocabulary", type=click.IntRange(min=2), default=6144, help="Tokens the head can guess.", show_default=True
)
@click.option("--ffn", type=click.IntRange(min=1), help="Width of the feed-forward layer.  [default: MODEL's]")
@click.option("--threads", type=click.IntRange(min=1), help="Processor cores to use.  [default: all]")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option(
    "--cache-dir", type=click.Path(path_type=Path), default=default_cache_dir, help="Where built-in models are kept."
)
def distill_command(
    model: str, out: Path, drafter: Literal["eagle", "eagle3"], tokens: int, prompts: Path | None, work: Path | None,
    minutes: float | None, epochs: int | None, vocabulary: int, ffn: int | None, threads: int | None,
    revision: str | None, cache_dir: Path,
) -> None:  # fmt: skip
    """Train a drafter head for MODEL, without a data set.

    MODEL writes prompts and answers, or answers to your prompts; the head learns to guess what MODEL says next from
    what it computes anyway. Everything is kept in the work folder, so that the same command goes on after an
    interrupt. Prints the file written to standard output; beside it lies a card, .json, with how well the head guesses.
    """
    begin()
    from specrt_export.distill.run import DistillRequest, distill
    from specrt_export.distill.train import TrainingPlan
    from specrt_export.progress import Progress

    request = DistillRequest(
        model=model, layout=drafter, out=out, work=work or out.with_suffix(".work"), tokens=tokens, prompts=prompts,
        minutes=minutes, vocabulary_size=vocabulary, ffn=ffn, threads=threads or os.cpu_count() or 1,
        training=TrainingPlan() if epochs is None else TrainingPlan(epochs=epochs), revision=revision,
        cache_dir=cache_dir, command=shlex.join(["specrt", *sys.argv[1:]]),
    )  # fmt: skip
    written = distill(request, Progress())
    if written is not None:
        click.echo(written)
