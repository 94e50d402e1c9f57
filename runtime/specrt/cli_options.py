"""Options and input shared by the commands."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from click.core import ParameterSource

from specrt.errors import RequestError

if TYPE_CHECKING:
    from specrt.language_model import LanguageModel
    from specrt.requests import Prompt

Command = TypeVar("Command", bound=Callable[..., Any])

artifact = click.argument("artifact", type=click.Path(path_type=Path))
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
device = click.option(
    "--device", metavar="NAME", help="cpu, or cuda:N for a GPU.  [default: cpu, for a TensorRT plan cuda:0]"
)
threads = click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one per physical core]")


def parse_pairs(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    """Turn ID=VALUE texts into a dict."""
    pairs = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            pairs[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"expected ID=VALUE, found {value!r}") from None
    return pairs


def parse_k(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | Literal["auto"] | None:
    """Turn a text into a number, if it is not `auto`."""
    if value is None or value == "auto":
        return None if value is None else "auto"
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"expected a whole number or 'auto', found {value!r}") from None


def parse_ks(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int | Literal["auto"]]:
    """Turn values of k with commas between into a list."""
    found = [parse_k(ctx, param, item.strip()) for item in value.split(",")] if value else []
    return [k for k in found if k is not None]


def parse_ints(_ctx: click.Context, _param: click.Parameter, value: str | None) -> list[int]:
    """Turn numbers with commas between into a list."""
    try:
        return [int(item) for item in value.split(",")] if value else []
    except ValueError:
        raise click.BadParameter(f"expected whole numbers with commas between, found {value!r}") from None


def parse_object(_ctx: click.Context, _param: click.Parameter, value: str | None) -> dict[str, Any] | None:
    """Turn a JSON object into a dict."""
    try:
        found = json.loads(value) if value is not None else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise click.BadParameter(f"expected a JSON object, found {value!r}")
    return found or None


_COUPLING = click.Choice(["gumbel", "rejection"])
_DRAFTER = click.option(
    "--drafter", help="ngram, suffix, model, eagle, medusa, early-exit, combined, none.  [default: the artifact's]"
)
_SETTINGS = (
    click.option(
        "-k", "--num-speculative-tokens", "k", metavar="K", callback=parse_k,
        help="Most tokens to propose per step, 0 for plain decoding.  [default: auto, as many as pay]",
    ),
    click.option("--max-step-ms", type=float, help="With adaptive k: longest step, in milliseconds."),
    click.option("--prompt-lookup-max", type=int, help="Longest n-gram that the ngram drafter looks up."),
    click.option("--prompt-lookup-min", type=int, help="Shortest one."),
    click.option("--suffix-cache", is_flag=True, help="Let the suffix drafter look into earlier outputs of this run."),
    click.option("--draft-budget-ms", type=float, help="Drop a drafter that takes longer for a proposal."),
    click.option("--tree", is_flag=True, help="Guess several tokens for one place (suffix, heads; needs --trees)."),
    click.option("--strict", is_flag=True, help="Bits of plain decoding for trees too, at some cost."),
    click.option("--temperature", type=float, help="0 is greedy.  [default: the model's]"),
    click.option("--top-k", type=int, help="Keep the K best tokens, 0 for all."),
    click.option("--top-p", type=float, help="Keep the best tokens with this much probability."),
    click.option("--min-p", type=float, help="Keep tokens at least this probable relative to the best."),
    click.option("--repetition-penalty", type=float, help="Above 1 against tokens seen before."),
    click.option("--frequency-penalty", type=float, help="Subtracted per earlier occurrence in the output."),
    click.option("--presence-penalty", type=float, help="Subtracted once for tokens in the output."),
    click.option("--logit-bias", multiple=True, metavar="ID=VALUE", callback=parse_pairs, help="Add to a logit."),
    click.option("--bad-words", multiple=True, metavar="TEXT", help="A text that must not occur; repeatable."),
    click.option("--min-tokens", type=int, help="No end before so many tokens."),
    click.option("--max-tokens", type=int, help="End after so many tokens.  [default: the model's, or the capacity]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
    click.option("--stop-token-ids", metavar="ID,...", callback=parse_ints, help="End at these tokens."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end tokens."),
    click.option("--seed", type=int, help="Repeat a sampled text.  [default: a new one each time]"),
    click.option("--coupling", type=_COUPLING, help="How drafts share randomness with the target.  [default: gumbel]"),
    click.option(
        "--chat-template-kwargs", metavar="JSON", callback=parse_object,
        help="Variables for the chat template, such as '{\"enable_thinking\": false}'.",
    ),
)  # fmt: skip


def sampling(command: Command) -> Command:
    """Add every option that decides what is generated and how it is drafted."""
    return _DRAFTER(settings(command))


def settings(command: Command) -> Command:
    """Add those options but the drafter."""
    for option in reversed(_SETTINGS):
        command = option(command)
    return command


def given(options: Mapping[str, Any]) -> Any:
    """Return the options that were set on the command line; 0 counts as set."""
    unset: tuple[Any, ...] = ((), [], {})
    return {name: v for name, v in options.items() if v is not None and v is not False and v not in unset}


def refuse_all_but(*names: str) -> None:
    """Raise `UsageError` for an option that was given but is not in `names`; the first leaves it without effect."""
    context = click.get_current_context()
    flags = {str(parameter.name): parameter.opts[0] for parameter in context.command.params}
    for name, flag in flags.items():
        if name not in names and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"{flag} has no effect with {flags[names[0]]}: leave it out")


@contextlib.contextmanager
def progress(length: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal's standard error; yield what moves it on by one of `length` steps."""
    where = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with click.progressbar(length=length, label="bench", file=where) as bar:
        yield lambda: bar.update(1)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the prompt of the command line, a file, or standard input; raises `RequestError` if it is not UTF-8."""
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give PROMPT or --prompt-file, not both")
    try:
        if prompt_file is not None:
            return prompt_file.read_bytes().decode("utf-8")
        if prompt in (None, "-"):
            return sys.stdin.buffer.read().decode("utf-8")
        return str(prompt).encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise RequestError(f"the prompt is not valid UTF-8: byte {error.start} is {byte:#04x}") from None
    except OSError as error:
        raise RequestError(f"{prompt_file}: cannot be read: {error.strerror}") from None


def prompt_for(model: "LanguageModel", text: str, *, system: str | None, raw: bool) -> "Prompt":
    """Return a text as the conversation that an artifact with a chat template wants, else as it is."""
    chat = model.tokenizer.has_chat_template and not raw
    if system is not None and not chat:
        raise click.UsageError("--system needs the chat template of an artifact that has one, without --raw")
    return messages(text, system) if chat else text


def read_line(*, prompt: bool) -> str:
    """Return the next line of standard input, stripped; empty at its end."""
    if prompt and sys.stdin.isatty():
        click.echo("> ", nl=False, err=True)
    try:
        return sys.stdin.buffer.readline().decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise RequestError(f"the message is not valid UTF-8: byte {error.start}") from None


def messages(text: str, system: str | None) -> list[dict[str, str]]:
    """Return a conversation that begins with a user's text."""
    return ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": text}]
