"""Time to the first token of a chat's second turn, with and without KV of the first (docs/prefix-cache.md).

python -m benchmarks.prefix_cache ARTIFACT --history 800

Rounds visit all settings in turn, so that a machine that drifts slows all of them alike. The clock runs from the
request (template and tokenizing included) to its first token.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import click

from specrt.errors import RequestError, SpecRTError
from specrt.language_model import LanguageModel, load
from specrt.machine import processor
from specrt.prompts import load_prompts

Messages = list[dict[str, str]]
_ANSWER, _SLACK, _MIB = 48, 24, 1024  # tokens of the first answer, and of the template's own; memory for copies
_NEXT = "Thank you. Now say the same in one short sentence."


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--history", default=800, show_default=True, type=click.IntRange(128), help="Tokens before the turn.")
@click.option("--repeats", default=9, show_default=True, type=click.IntRange(1))
@click.option("--threads", type=click.IntRange(1), help="CPU threads; one per physical core if left out.")
def main(artifact: Path, history: int, repeats: int, threads: int | None) -> None:
    """Measure the second turn from cold, from the engine's own buffers, and from copies in host memory."""
    try:
        with load(artifact, threads=threads, prefix_cache_mib=_MIB) as model:
            report(model, measure(model, history=history, repeats=repeats))
    except SpecRTError as error:
        raise click.ClickException(str(error)) from None


def measure(model: LanguageModel, *, history: int, repeats: int) -> dict[str, list[tuple[float, int]]]:
    """Return seconds to the first token and reused tokens by setting; raises if the first tokens differ."""
    first = [{"role": "user", "content": long_text(model, history - _ANSWER - _SLACK)}]
    other = [{"role": "user", "content": long_text(model, history - _ANSWER - _SLACK, skip=100)}]
    answer = model.generate(first, max_tokens=_ANSWER, temperature=0, ignore_eos=True).text
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": _NEXT}]
    found: dict[str, list[tuple[float, int]]] = {"cold": [], "buffers": [], "copies": []}
    tokens = set()
    for turn in range(repeats + 1):
        for setting, runs in found.items():
            model.generate(first, max_tokens=_ANSWER, temperature=0, ignore_eos=True)
            if setting == "copies":
                model.generate(other, max_tokens=1)
            seconds, cached, token = _first_token(model, second, cold=setting == "cold")
            tokens.add(token)
            if turn:  # the first round binds calls
                runs.append((seconds, cached))
    if len(tokens) > 1:
        raise SpecRTError(f"expected one first token, found {tokens}: run 'specrt check'")
    return found


def long_text(model: LanguageModel, num_tokens: int, *, skip: int = 0) -> str:
    """Return about so many tokens of the built-in prompts, from a place in them on."""
    ids = model.tokenizer.encode(" ".join(prompt.text for prompt in load_prompts(None)))[skip:]
    if num_tokens + skip > model.target.capacity:
        raise RequestError(f"history: expected less than the capacity {model.target.capacity}, found {num_tokens}")
    return model.tokenizer.decode((ids * (1 + num_tokens // len(ids)))[:num_tokens])


def _first_token(model: LanguageModel, messages: Messages, *, cold: bool) -> tuple[float, int, int]:
    options: Any = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    with model.start(messages, options, cold=cold) as stream:
        token = next(stream)
        return time.perf_counter() - started, stream.result.stats.num_cached_tokens, token.id


def report(model: LanguageModel, found: dict[str, list[tuple[float, int]]]) -> None:
    """Print a table."""
    cold = statistics.median(seconds for seconds, _ in found["cold"])
    click.echo(f"{model.folder}, {processor()}\n")
    click.echo(
        "| KV of the first turn | reused tokens | ms to the first token | of cold | spread |\n|---|---|---|---|---|"
    )
    for setting, runs in found.items():
        times = [seconds for seconds, _ in runs]
        median = statistics.median(times)
        click.echo(
            f"| {setting} | {runs[0][1]} | {1e3 * median:.0f} | {median / cold:.2f} | "
            f"{(max(times) - min(times)) / median:.0%} |"
        )


if __name__ == "__main__":
    main()
