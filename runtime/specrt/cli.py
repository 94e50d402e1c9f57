"""The `specrt` command. Everything heavy is imported by the command that needs it."""

import contextlib
import io
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from specrt import cli_options as options
from specrt.cli_tune import tune
from specrt.errors import RequestError, SpecRTError

if TYPE_CHECKING:
    from specrt.check import CheckReport
    from specrt.stream import Result, Stream


class _Group(click.Group):
    """A group whose commands also come from other packages, and whose user errors are one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *entry_points(group="specrt.commands").names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for entry in entry_points(group="specrt.commands", name=cmd_name):
            command: click.Command = entry.load()
            return command
        return super().get_command(ctx, cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            return super().parse_args(ctx, args)  # shows the help page
        with _one_line_errors():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """End the process with one line and code 1 where the user made a mistake; bugs keep their traceback."""
    try:
        yield
    except SpecRTError as error:
        _fail(str(error))
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "specrt"
        _fail(f"{error.format_message()} (see '{command} --help')")


@click.group(cls=_Group)
@click.version_option(package_name="specrt")
def main() -> None:
    """Lossless speculative decoding from self-contained artifacts."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console that lacks a character shows ? and goes on


main.add_command(tune)


@main.command(epilog="""\b
Examples:
  specrt generate artifacts/smollm2-135m "Why is the sky blue?" --max-tokens 100
  specrt generate artifacts/smollm2-135m --raw "def fib(n):" -k 9 --temperature 0.8 --seed 1""")  # fmt: skip
@options.artifact
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a UTF-8 file.")
@click.option("--system", help="System message.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, even if the artifact has a chat template.")
@click.option("--logprobs", type=int, metavar="N", help="With --json: log-probabilities and the N best alternatives.")
@options.sampling
@options.threads
@options.as_json
def generate(
    artifact: Path, prompt: str | None, prompt_file: Path | None, system: str | None, raw: bool, threads: int | None,
    as_json: bool, **sampling: Any,
) -> None:  # fmt: skip
    """Generate from PROMPT (standard input if it is - or left out).

    The text goes to standard output as it comes, one line of statistics to standard error.
    """
    from specrt.language_model import load

    if sampling["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json")
    text = options.read_prompt(prompt, prompt_file)
    with load(artifact, threads=threads) as model:
        chat = model.tokenizer.has_chat_template and not raw
        if system is not None and not chat:
            raise click.UsageError("--system needs the chat template of an artifact that has one, without --raw")
        with model.stream(options.messages(text, system) if chat else text, **options.given(sampling)) as stream:
            _print(stream, as_json=as_json)


@main.command(epilog="""\b
Examples:
  specrt chat artifacts/smollm2-135m
  specrt chat artifacts/smollm2-135m --system "Answer in one sentence." --temperature 0.7 --seed 1""")  # fmt: skip
@options.artifact
@click.option("--system", help="System message.")
@options.sampling
@options.threads
@options.as_json
def chat(artifact: Path, system: str | None, threads: int | None, as_json: bool, **sampling: Any) -> None:
    """Talk with the model, one message per line; /reset starts over, an empty line or the end of input leaves."""
    from specrt.language_model import load

    given = options.given(sampling)
    with load(artifact, threads=threads) as model:
        messages: list[dict[str, str]] = []
        turn = 0
        while text := options.read_line(prompt=not as_json):
            if text == "/reset":
                messages = []
                continue
            asked = [*messages, *options.messages(text, None if messages else system)]
            try:
                stream = model.stream(asked, **{"stream": turn, **given})
            except RequestError as error:
                if not messages:
                    raise
                click.echo(f"error: {error}; /reset starts over", err=True)  # the conversation is not lost
                continue
            with stream:
                result = _print(stream, as_json=as_json)
            messages = [*asked, {"role": "assistant", "content": result.text}]
            turn += 1


@main.command(epilog="""\b
Examples:
  specrt bench artifacts/smollm2-135m
  specrt bench artifacts/smollm2-135m --prompts prompts.jsonl --ks 3,5 --drafter model --limit 2 --json
  specrt bench artifacts/smollm2-135m --engine --plot calls.png""")  # fmt: skip
@options.artifact
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON lines with 'turns' or 'prompt', and 'category'.")
@click.option("--limit", type=click.IntRange(min=1), help="Prompts per category.")
@click.option(
    "--ks", metavar="K,...", callback=options.parse_ints, help="Values of k; -k for a single one.  [default: 3,5,15]"
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
@options.sampling
@options.threads
@options.as_json
def bench(
    artifact: Path, prompts: Path | None, limit: int | None, ks: list[int], repeats: int | None, raw: bool,
    engine: bool, context: int | None, plot: Path | None, threads: int | None, as_json: bool, **sampling: Any,
) -> None:  # fmt: skip
    """Compare plain and speculative decoding on a prompt file (a small built-in set if none is given).

    plain-1 decodes with calls of width 1, the fastest plain decoding, and is what speedups refer to; plain is the
    loop without proposals. 128 tokens per prompt unless --max-tokens says otherwise.
    """
    if engine:
        options.refuse_all_but("engine", "artifact", "repeats", "context", "plot", "threads", "as_json")
        _bench_engine(artifact, context, plot, repeats=repeats or 9, threads=threads, as_json=as_json)
        return
    if context is not None or plot is not None:
        raise click.UsageError(f"{'--plot' if context is None else '--context'} needs --engine")
    from specrt.bench import format_table, num_runs, run_bench
    from specrt.language_model import load
    from specrt.prompts import load_prompts

    given: Any = {"max_tokens": 128, **options.given(sampling)}
    if ks and "k" in given:
        raise click.UsageError("give --ks or -k, not both")
    repeats = repeats or 3
    ks = ks or ([given.pop("k")] if "k" in given else [3, 5, 15])
    texts = load_prompts(prompts, limit=limit)
    with load(artifact, threads=threads) as model:
        drafter = given.pop("drafter", model.manifest.default_drafter)
        with options.progress(num_runs(len(texts), ks, repeats)) as advance:
            rows = run_bench(
                model, texts, ks=ks, drafter=drafter, repeats=repeats, options=given,
                chat=model.tokenizer.has_chat_template and not raw, on_run=advance,
            )  # fmt: skip
    report = {"artifact": str(artifact), "drafter": drafter, "repeats": repeats, "rows": [asdict(row) for row in rows]}
    table = f"drafter {drafter}, {repeats} repeats\n\n{format_table(rows)}"
    click.echo(json.dumps(report) if as_json else table)


@main.command(epilog="""\b
Examples:
  specrt check artifacts/smollm2-135m
  specrt check artifacts/smollm2-135m --threads 1 --json""")  # fmt: skip
@options.artifact
@options.threads
@options.as_json
def check(artifact: Path, threads: int | None, as_json: bool) -> None:
    """Verify an artifact on this machine: hashes, reference logits, and which call widths give the same bits."""
    from specrt.check import check_artifact

    report = check_artifact(artifact, threads=threads)
    click.echo(json.dumps(report.to_dict()) if as_json else _check_page(report))
    for problem in report.problems:
        click.echo(f"error: {problem}", err=True)
    sys.exit(1 if report.problems else 0)


@main.command(epilog="""\b
Examples:
  specrt inspect artifacts/smollm2-135m
  specrt inspect artifacts/smollm2-135m --json""")  # fmt: skip
@options.artifact
@options.as_json
def inspect(artifact: Path, as_json: bool) -> None:
    """Show what an artifact holds, without loading its engines."""
    from specrt.inspect import describe, show

    click.echo(json.dumps(describe(artifact)) if as_json else show(artifact))


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


def _print(stream: "Stream", *, as_json: bool) -> "Result":
    """Print a generation: its text as it comes and its statistics, or one JSON object at its end."""
    for token in stream:
        if not as_json:
            click.echo(token.text, nl=False)
    result = stream.result
    if as_json:
        click.echo(json.dumps(_to_json(result)))
    else:
        click.echo()
        click.echo(f"finished: {result.finish_reason} | {result.stats.summary()}", err=True)
    return result


def _to_json(result: "Result") -> dict[str, Any]:
    fields = ("text", "token_ids", "finish_reason", "stop")
    bias = {id_: value if math.isfinite(value) else str(value) for id_, value in result.params.logit_bias.items()}
    return {
        **{name: getattr(result, name) for name in fields},
        "logprobs": None if result.logprobs is None else [asdict(entry) for entry in result.logprobs],
        "params": {**asdict(result.params), "logit_bias": bias},
        "stats": result.stats.to_dict(),
    }


def _check_page(report: "CheckReport") -> str:
    lines = [f"{report.num_files} files: sizes and SHA-256 as in the manifest"]
    for engine in report.engines:
        groups = " | ".join(", ".join(map(str, group)) for group in engine.groups) or "none"
        lines += [
            f"{engine.name}: {engine.num_rows} rows replayed: max |diff| {engine.max_abs_diff:.2g} "
            f"(at export {engine.exported_max_abs_diff:.2g}), mean KL {engine.mean_kl:.2g} "
            f"({engine.exported_mean_kl:.2g}), top-1 {engine.top1_agreement:.1%}",
            f"{engine.name}: widths with the same bits: {groups}; the loop uses {', '.join(map(str, engine.ladder))}",
        ]
        if engine.needs_exact_rows:
            lines[-1] += f"; KV is reused {'token by token' if engine.exact_prefill else 'by whole prefill calls'}"
    return "\n".join(lines)


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(1)
