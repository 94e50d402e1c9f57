"""The `specrt` command."""

import json
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

import click

from specrt.errors import RequestError, SpecRTError

_ARTIFACT = click.argument("artifact", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_THREADS = click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one per physical core]")


class _Group(click.Group):
    """A group whose commands also come from other packages, and whose user errors are one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *entry_points(group="specrt.commands").names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = entry_points(group="specrt.commands", name=cmd_name)
        for entry in found:
            command: click.Command = entry.load()
            return command
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpecRTError as error:
            _fail(str(error))
        except BrokenPipeError:
            sys.stderr.close()  # nobody reads on; leave quietly
            sys.exit(141)


@click.group(cls=_Group)
@click.version_option(package_name="specrt")
def main() -> None:
    """Lossless speculative decoding from self-contained artifacts."""


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(1)


def _pairs(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    pairs = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            pairs[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"expected ID=VALUE, found {value!r}") from None
    return pairs


def _ids(_ctx: click.Context, _param: click.Parameter, value: str | None) -> list[int]:
    try:
        return [int(item) for item in value.split(",")] if value else []
    except ValueError:
        raise click.BadParameter(f"expected token ids with commas between, found {value!r}") from None


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--drafter", help="ngram, model or none.  [default: the artifact's]"),
    click.option("-k", "--num-speculative-tokens", "k", type=int, help="Most tokens to propose per step, 0 for plain decoding.  [default: the artifact's]"),
    click.option("--prompt-lookup-max", type=int, help="Longest n-gram that the ngram drafter looks up."),
    click.option("--prompt-lookup-min", type=int, help="Shortest one."),
    click.option("--temperature", type=float, help="0 is greedy.  [default: the model's]"),
    click.option("--top-k", type=int, help="Keep the K best tokens, 0 for all."),
    click.option("--top-p", type=float, help="Keep the best tokens with this much probability."),
    click.option("--min-p", type=float, help="Keep tokens at least this probable relative to the best."),
    click.option("--repetition-penalty", type=float, help="Above 1 against tokens seen before."),
    click.option("--frequency-penalty", type=float, help="Subtracted per earlier occurrence in the output."),
    click.option("--presence-penalty", type=float, help="Subtracted once for tokens in the output."),
    click.option("--logit-bias", multiple=True, metavar="ID=VALUE", callback=_pairs, help="Add to a token's logit; repeatable."),
    click.option("--bad-words", multiple=True, metavar="TEXT", help="A text that must not occur; repeatable."),
    click.option("--min-tokens", type=int, help="No end before so many tokens."),
    click.option("--max-tokens", type=int, help="End after so many tokens.  [default: the model's, or the capacity]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
    click.option("--stop-token-ids", metavar="ID,...", callback=_ids, help="End at these tokens."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end tokens."),
    click.option("--seed", type=int, help="Repeat a sampled text.  [default: a new one]"),
    click.option("--coupling", type=click.Choice(["gumbel", "rejection"]), help="How drafts share randomness with the target.  [default: gumbel]"),
)  # fmt: skip


def _sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _given(options: Mapping[str, Any]) -> Any:
    """Return the options that were set on the command line; 0 counts as set."""
    unset: tuple[Any, ...] = ((), [], {})
    return {name: value for name, value in options.items() if value is not None and value is not False and value not in unset}


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    try:
        if prompt_file is not None:
            return prompt_file.read_bytes().decode("utf-8")
        if prompt in (None, "-"):
            return sys.stdin.buffer.read().decode("utf-8")
        return str(prompt).encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt is not valid UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    except OSError as error:
        raise RequestError(f"{prompt_file}: cannot be read: {error.strerror}") from None


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    return ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": text}]


def _result_dict(result: Any) -> dict[str, Any]:
    logprobs = result.logprobs and [{"token_id": e.token_id, "logprob": e.logprob, "top": [list(t) for t in e.top]} for e in result.logprobs]
    return {
        "text": result.text, "token_ids": list(result.token_ids), "finish_reason": result.finish_reason, "stop": result.stop,
        "seed": result.params.seed, "temperature": result.params.temperature, "logprobs": logprobs, "stats": result.stats.to_dict(),
    }  # fmt: skip


@main.command(epilog="""\b
Examples:
  specrt generate artifacts/smollm2-135m "Why is the sky blue?" --max-tokens 100
  specrt generate artifacts/smollm2-135m --raw "def fib(n):" -k 9 --temperature 0.8 --seed 1""")  # fmt: skip
@_ARTIFACT
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a UTF-8 file.")
@click.option("--system", help="System message.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, even if the artifact has a chat template.")
@click.option("--logprobs", type=int, metavar="N", help="With --json: log-probabilities and the N best alternatives.")
@_sampling_options
@_THREADS
@_JSON
def generate(artifact: Path, prompt: str | None, prompt_file: Path | None, system: str | None, raw: bool, threads: int | None,
             as_json: bool, **options: Any) -> None:  # fmt: skip
    """Generate from PROMPT (standard input if it is - or left out).

    The text goes to standard output as it comes, one line of statistics to standard error.
    """
    from specrt.language_model import load

    text = _read_prompt(prompt, prompt_file)
    with load(artifact, threads=threads) as model:
        chat = model.tokenizer.has_chat_template and not raw
        with model.stream(_messages(text, system) if chat else text, **_given(options)) as stream:
            for token in stream:
                if not as_json:
                    click.echo(token.text, nl=False)
        result = stream.result
        click.echo(json.dumps(_result_dict(result)) if as_json else "")
        if not as_json:
            click.echo(result.stats.summary(), err=True)


@main.command(epilog="""\b
Examples:
  specrt chat artifacts/smollm2-135m
  specrt chat artifacts/smollm2-135m --system "Answer in one sentence." --temperature 0.7 --seed 1""")  # fmt: skip
@_ARTIFACT
@click.option("--system", help="System message.")
@_sampling_options
@_THREADS
@_JSON
def chat(artifact: Path, system: str | None, threads: int | None, as_json: bool, **options: Any) -> None:
    """Talk with the model: one message per line, /reset to start over, an empty line or end of input to leave."""
    from specrt.language_model import load

    given = _given(options)
    with load(artifact, threads=threads) as model:
        messages: list[dict[str, str]] = []
        turn = 0
        while text := _next_line(as_json):
            if text == "/reset":
                messages = []
                continue
            messages = messages + [{"role": "user", "content": text}] if messages else _messages(text, system)
            with model.stream(messages, **{"stream": turn, **given}) as stream:
                for token in stream:
                    if not as_json:
                        click.echo(token.text, nl=False)
            result = stream.result
            messages.append({"role": "assistant", "content": result.text})
            click.echo(json.dumps(_result_dict(result)) if as_json else "")
            if not as_json:
                click.echo(result.stats.summary(), err=True)
            turn += 1


def _next_line(as_json: bool) -> str:
    if sys.stdin.isatty() and not as_json:
        click.echo("> ", nl=False, err=True)
    try:
        return sys.stdin.buffer.readline().decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise RequestError(f"the message is not valid UTF-8: byte {error.start}") from None


@main.command(epilog="""\b
Examples:
  specrt bench artifacts/smollm2-135m
  specrt bench artifacts/smollm2-135m --prompts prompts.jsonl --ks 3,5 --drafter model --limit 2 --json""")  # fmt: skip
@_ARTIFACT
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON lines with 'turns' or 'prompt', and 'category'.  [default: a built-in set]")
@click.option("--limit", type=click.IntRange(min=1), help="Prompts per category.")
@click.option("--ks", metavar="K,...", default="3,5,8", show_default=True, callback=_ids, help="Proposal lengths to compare.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each prompt and setting.")
@click.option("--raw", is_flag=True, help="Continue the prompts as they are, without the chat template.")
@_sampling_options
@_THREADS
@_JSON
def bench(artifact: Path, prompts: Path | None, limit: int | None, ks: list[int], repeats: int, raw: bool, threads: int | None,
          as_json: bool, **options: Any) -> None:  # fmt: skip
    """Compare plain and speculative decoding on a prompt file.

    plain-1 decodes with calls of width 1, the fastest plain decoding, and is what speedups refer to; plain is the loop without proposals.
    128 tokens per prompt unless --max-tokens says otherwise.
    """
    from dataclasses import asdict

    from specrt.bench import format_table, num_runs, run_bench
    from specrt.language_model import load
    from specrt.prompts import load_prompts

    texts = load_prompts(prompts, limit=limit)
    given = {"max_tokens": 128, **_given(options)}
    given.pop("k", None)
    with load(artifact, threads=threads) as model:
        drafter = given.pop("drafter", model.manifest.default_drafter)
        total = num_runs(len(texts), ks, repeats)
        with click.progressbar(length=total, label="bench", file=sys.stderr) as bar:
            rows = run_bench(
                model, texts, ks=ks, drafter=drafter, repeats=repeats, options=given,
                chat=model.tokenizer.has_chat_template and not raw, on_run=lambda: bar.update(1),
            )  # fmt: skip
    if as_json:
        click.echo(json.dumps({"artifact": str(artifact), "drafter": drafter, "repeats": repeats, "rows": [asdict(row) for row in rows]}))
    else:
        click.echo(f"drafter {drafter}, {repeats} repeats\n\n{format_table(rows)}")


@main.command(epilog="""\b
Examples:
  specrt check artifacts/smollm2-135m
  specrt check artifacts/smollm2-135m --threads 1 --json""")  # fmt: skip
@_ARTIFACT
@_THREADS
@_JSON
def check(artifact: Path, threads: int | None, as_json: bool) -> None:
    """Verify an artifact on this machine: hashes, reference logits, and which call widths give the same bits."""
    from specrt.check import check_artifact

    report = check_artifact(artifact, threads=threads)
    if as_json:
        click.echo(json.dumps(report.to_dict()))
    else:
        click.echo(f"{report.num_files} files: sizes and SHA-256 as in the manifest")
        for engine in report.engines:
            click.echo(
                f"{engine.name}: {engine.num_rows} rows replayed: max |diff| {engine.max_abs_diff:.2g} (at export {engine.exported_max_abs_diff:.2g}), "
                f"mean KL {engine.mean_kl:.2g} ({engine.exported_mean_kl:.2g}), top-1 {engine.top1_agreement:.1%}"
            )
            groups = " | ".join(", ".join(map(str, group)) for group in engine.groups)
            click.echo(f"{engine.name}: widths that give the same bits: {groups or 'none'}; the loop uses {', '.join(map(str, engine.ladder))}")
    for problem in report.problems:
        click.echo(f"error: {problem}", err=True)
    sys.exit(1 if report.problems else 0)


@main.command(epilog="""\b
Examples:
  specrt inspect artifacts/smollm2-135m
  specrt inspect artifacts/smollm2-135m --json""")  # fmt: skip
@_ARTIFACT
@_JSON
def inspect(artifact: Path, as_json: bool) -> None:
    """Show what an artifact holds, without loading its engines."""
    from specrt.inspect import describe, show

    click.echo(json.dumps(describe(artifact)) if as_json else show(artifact))
