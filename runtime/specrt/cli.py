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
from specrt.cli_bench import bench
from specrt.cli_trace import trace
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


main.add_command(bench)
main.add_command(tune)
main.add_command(trace)


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
@options.device
@options.threads
@options.as_json
def generate(
    artifact: Path, prompt: str | None, prompt_file: Path | None, system: str | None, raw: bool, device: str | None,
    threads: int | None, as_json: bool, **sampling: Any,
) -> None:  # fmt: skip
    """Generate from PROMPT (standard input if it is - or left out).

    The text goes to standard output as it comes, one line of statistics to standard error.
    """
    from specrt.language_model import load

    if sampling["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json")
    text = options.read_prompt(prompt, prompt_file)
    with load(artifact, device=device, threads=threads) as model:
        prompt_ = options.prompt_for(model, text, system=system, raw=raw)
        with model.stream(prompt_, **options.given(sampling)) as stream:
            _print(stream, as_json=as_json)


@main.command(epilog="""\b
Examples:
  specrt chat artifacts/smollm2-135m
  specrt chat artifacts/smollm2-135m --system "Answer in one sentence." --temperature 0.7 --seed 1""")  # fmt: skip
@options.artifact
@click.option("--system", help="System message.")
@options.sampling
@options.device
@options.threads
@options.as_json
def chat(
    artifact: Path, system: str | None, device: str | None, threads: int | None, as_json: bool, **sampling: Any
) -> None:
    """Talk with the model, one message per line; /reset starts over, an empty line or the end of input leaves."""
    from specrt.language_model import load

    given = options.given(sampling)
    with load(artifact, device=device, threads=threads) as model:
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
  specrt check artifacts/smollm2-135m
  specrt check artifacts/smollm2-135m --threads 1 --json
  specrt check artifacts/smollm2-135m-trt --device cuda:0""")  # fmt: skip
@options.artifact
@options.device
@options.threads
@options.as_json
def check(artifact: Path, device: str | None, threads: int | None, as_json: bool) -> None:
    """Verify an artifact on this machine: hashes, reference logits, and which call widths give the same bits."""
    from specrt.check import check_artifact

    report = check_artifact(artifact, device=device, threads=threads)
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
