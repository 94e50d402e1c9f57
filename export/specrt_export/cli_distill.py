"""`specrt distill`. The heavy libraries are imported when work begins."""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import click

from specrt_export.cli import begin, default_cache_dir


@click.command(name="distill", epilog="""\b
Examples:
  specrt distill smollm2-135m -o heads/smollm2.safetensors
  specrt distill ./my-model --drafter eagle3 --prompts questions.jsonl -o heads/mine.safetensors
  specrt distill smollm2-135m --start own --prompts questions.jsonl -o heads/smollm2-mine.safetensors
  specrt distill smollm2-135m --drafter medusa --heads 4 -o heads/smollm2-medusa.safetensors
  specrt distill smollm2-135m --drafter early-exit --layers 12 -o heads/smollm2-exit.safetensors
  specrt distill smollm2-135m --drafter pruned --layers 8 -o drafts/smollm2-8
  specrt distill smollm2-135m --tokens 100000 --minutes 30 -o heads/trial.safetensors""")  # fmt: skip
@click.argument("model")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="File to write, .safetensors; a folder for pruned.",
)
@click.option(
    "--drafter",
    type=click.Choice(["eagle", "eagle3", "medusa", "early-exit", "pruned"]),
    default="eagle",
    show_default=True,
    help="A head's layout, MODEL's own first layers, or MODEL with fewer layers.",
)
@click.option("--heads", type=click.IntRange(1, 16), help="How many medusa heads.  [default: 4]")
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
@click.option(
    "--epochs",
    type=click.IntRange(min=0),
    help="Times the text is read; 0 only prunes.  [default: 8, early-exit: 4, pruned: 3]",
)
@click.option(
    "--layers",
    type=click.IntRange(min=1),
    help="Layers of a pruned draft, or before an early exit.  [default: a quarter of MODEL's; the best exit]",
)
@click.option(
    "--vocabulary",
    type=click.IntRange(min=2),
    help="Tokens that a head or pruned draft can guess, and an early exit learns above all.  [default: 6144]",
)
@click.option("--ffn", type=click.IntRange(min=1), help="Width of the feed-forward layer.  [default: MODEL's]")
@click.option(
    "--start",
    metavar="FILE|own",
    help="Eagle head to begin with, whose --ffn and --vocabulary are kept; own: that of a built-in MODEL.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Processor cores to use.  [default: all]")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option(
    "--cache-dir", type=click.Path(path_type=Path), default=default_cache_dir, help="Where built-in models are kept."
)
def distill_command(
    model: str, out: Path, drafter: Literal["eagle", "eagle3", "medusa", "early-exit", "pruned"], heads: int | None,
    tokens: int, prompts: Path | None, work: Path | None, minutes: float | None, epochs: int | None,
    layers: int | None, vocabulary: int | None, ffn: int | None, start: str | None, threads: int | None,
    revision: str | None, cache_dir: Path,
) -> None:  # fmt: skip
    """Train a drafter head for MODEL, or a draft of fewer layers, without a data set.

    MODEL writes prompts and answers, or answers to your prompts; the head learns to guess what MODEL says next from
    what it computes anyway. Everything is kept in the work folder, so that the same command goes on after an
    interrupt. Prints the file written to standard output; beside it lies a card, .json, with how well the head guesses.

    With --drafter early-exit MODEL's own first layers guess; what is trained is a map from the state after them to what
    MODEL's output layer reads.

    With --drafter pruned the layers that change least are dropped, and what is left learns to say what MODEL says.
    OUT is a transformers directory then, for 'specrt export MODEL --draft OUT'; its card is draft.json.
    """
    _check_options(drafter, ffn=ffn, start=start, heads=heads, layers=layers, epochs=epochs)
    if start is not None and vocabulary is not None:
        raise click.UsageError("--vocabulary has no effect with --start: the head there keeps its own")
    begin_with = _start(model, start)
    begin()
    from specrt_export.distill.call import NUM_HEADS, VOCABULARY, DistillRequest
    from specrt_export.distill.exit import EXIT_HEALING
    from specrt_export.distill.heal import HEALING
    from specrt_export.distill.run import distill
    from specrt_export.distill.train import TrainingPlan
    from specrt_export.progress import Progress

    plan = {"early-exit": EXIT_HEALING, "pruned": HEALING}.get(drafter, TrainingPlan())
    request = DistillRequest(
        model=model, layout=drafter, out=out, work=work or out.with_suffix(".work"), tokens=tokens, prompts=prompts,
        minutes=minutes, vocabulary_size=vocabulary or VOCABULARY, ffn=ffn, start=begin_with, heads=heads or NUM_HEADS,
        layers=layers, threads=threads or os.cpu_count() or 1,
        training=plan if epochs is None else replace(plan, epochs=epochs),
        revision=revision, cache_dir=cache_dir, command=shlex.join(["specrt", *sys.argv[1:]]),
    )  # fmt: skip
    written = distill(request, Progress())
    if written is not None:
        click.echo(written)


def _check_options(
    drafter: str, *, ffn: int | None, start: str | None, heads: int | None, layers: int | None, epochs: int | None
) -> None:
    """Raise `UsageError` for an option of another drafter."""
    if drafter in ("medusa", "early-exit", "pruned") and ffn is not None:
        raise click.UsageError(f"--ffn is of eagle heads: --drafter {drafter} has none of its own")
    if drafter in ("medusa", "early-exit", "pruned") and start is not None:
        raise click.UsageError(f"--start is a head of eagle or eagle3: --drafter {drafter} has none")
    if drafter != "medusa" and heads is not None:
        raise click.UsageError("--heads needs --drafter medusa")
    if drafter not in ("early-exit", "pruned") and layers is not None:
        raise click.UsageError("--layers needs --drafter early-exit or pruned")
    if drafter != "pruned" and epochs == 0:
        raise click.UsageError("--epochs 0 needs --drafter pruned")


def _start(model: str, start: str | None) -> Path | None:
    if start != "own":
        return None if start is None else Path(start)
    from specrt_export.catalogue import own_head

    head = own_head(model)
    if head is None:
        raise click.UsageError(f"--start own needs a built-in model that a head comes with, found {model}")
    return head
