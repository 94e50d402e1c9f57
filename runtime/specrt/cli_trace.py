"""`specrt trace`."""

import json
from pathlib import Path
from typing import Any

import click

from specrt import cli_options as options


@click.command(epilog="""\b
Examples:
  specrt trace artifacts/smollm2-135m "Why is the sky blue?" -o trace.html
  specrt trace artifacts/smollm2-135m --raw "def fib(n):" -k 9 --temperature 0.8 --seed 1 -o trace.html""")  # fmt: skip
@options.artifact
@click.argument("prompt", required=False)
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FILE", required=True, help="The page to write.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a UTF-8 file.")
@click.option("--system", help="System message.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, even if the artifact has a chat template.")
@options.sampling
@options.device
@options.threads
@options.as_json
def trace(
    artifact: Path, prompt: str | None, out: Path, prompt_file: Path | None, system: str | None, raw: bool,
    device: str | None, threads: int | None, as_json: bool, **sampling: Any,
) -> None:  # fmt: skip
    """Generate from PROMPT and write a page that shows where each token of the text came from.

    Tokens are coloured by origin: accepted guess, recovered, bonus, plain. Each step shows its proposal, what became of
    it and its times. The page is one HTML file without scripts that needs no network.
    """
    from specrt.language_model import load
    from specrt.output import check_output, write_output
    from specrt.trace import run_trace
    from specrt.trace_page import trace_page

    check_output(out, what="trace")
    text = options.read_prompt(prompt, prompt_file)
    given = options.given(sampling)
    with load(artifact, device=device, threads=threads) as model:
        found = run_trace(model, options.prompt_for(model, text, system=system, raw=raw), given)
        page = trace_page(found, model.manifest, model.tokenizer, given)
    write_output(out, page, what="trace")
    stats = found.result.stats
    report = {"artifact": str(artifact), "page": str(out), **found.to_dict(), "stats": stats.to_dict()}
    click.echo(json.dumps(report) if as_json else f"{out}: {stats.summary()}")
