"""Rules that decide how many tokens to guess: fixed k, two that are in use elsewhere, and adaptive k (docs/tuning.md).

python -m benchmarks.control ARTIFACT --drafter combined --drafter suffix

Every prompt runs under all rules in turn, so that a machine that drifts slows all alike, and must give one text under
all of them. The two other rules look at counts of accepted tokens only, not at what calls and guesses cost. They are
controllers as anybody may bring one (the request option `controller`).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import click

from specrt.cli_options import parse_ks
from specrt.control import FixedController, Step
from specrt.errors import SpecRTError
from specrt.language_model import LanguageModel, load
from specrt.machine import processor
from specrt.prompts import BenchPrompt, as_request, check_prompts, load_prompts

PLAIN = "plain"
Runs = dict[str, dict[str, list[tuple[int, float]]]]  # rule -> category -> tokens and seconds of each prompt


class Ewma(FixedController):
    """Asks for one token more than were accepted lately: an exponentially weighted mean that starts at `first`."""

    def __init__(self, *, first: int = 5, weight: float = 0.2) -> None:
        super().__init__(first)
        self._mean, self._weight = float(first), weight

    def limit(self, most: int) -> int:
        """Return the mean, rounded up, and one more."""
        return min(most, math.ceil(self._mean) + 1)

    def learn(self, step: Step) -> None:
        """Take in what was accepted, where something was guessed."""
        if step.proposal.token_ids:
            self._mean += self._weight * (step.num_accepted - self._mean)


class Heuristic(Ewma):
    """Two more after a step in which all were accepted, one less after any other (`heuristic` of transformers)."""

    def limit(self, most: int) -> int:
        """Return the present number."""
        return min(most, int(self._mean))

    def learn(self, step: Step) -> None:
        """Count up or down."""
        if step.proposal.token_ids:
            whole = step.num_accepted == len(step.proposal.token_ids)
            self._mean = max(1.0, self._mean + (2 if whole else -1))


OTHERS: dict[str, Callable[[], Any]] = {"ewma": Ewma, "heuristic": Heuristic}


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--drafter", "drafters", multiple=True, help="May be repeated.  [default: the artifact's own]")
@click.option("--ks", default="3,5,9,15,auto", show_default=True, callback=parse_ks, help="Values of k.")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON lines.  [default: the built-in ones]")
@click.option("--limit", type=click.IntRange(1), help="Prompts per category.")
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1))
@click.option("--threads", type=click.IntRange(1), help="CPU threads; one per physical core if left out.")
def main(
    artifact: Path, drafters: tuple[str, ...], ks: list[Any], prompts: Path | None, limit: int | None, max_tokens: int,
    repeats: int, threads: int | None,
) -> None:  # fmt: skip
    """Measure greedy decoding of ARTIFACT under each rule."""
    try:
        with load(artifact, threads=threads) as model:
            chosen = load_prompts(prompts, limit=limit)
            check_prompts(model, chosen, {}, chat=True)
            for drafter in drafters or (model.manifest.default_drafter,):
                rules = rules_for(drafter, ks)
                click.echo(table(drafter, measure(model, chosen, rules, max_tokens=max_tokens, repeats=repeats)))
            click.echo(f"\n{len(chosen)} prompts, up to {max_tokens} tokens, {repeats} runs of each, {processor()}")
    except SpecRTError as error:
        raise click.ClickException(str(error)) from None


def rules_for(drafter: str, ks: Sequence[Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return what makes the options of a request under each rule; controllers are new for each."""
    rules: dict[str, Callable[[], dict[str, Any]]] = {PLAIN: lambda: {"drafter": "none"}}
    for k in ks:
        rules[f"k={k}"] = lambda k=k: {"drafter": drafter, "k": k}  # type: ignore[misc]
    for name, make in OTHERS.items():
        rules[name] = lambda make=make: {"drafter": drafter, "controller": make()}  # type: ignore[misc]
    return rules


def measure(
    model: LanguageModel, prompts: Sequence[BenchPrompt], rules: dict[str, Callable[[], dict[str, Any]]], *,
    max_tokens: int, repeats: int,
) -> Runs:  # fmt: skip
    """Return tokens and the median of seconds, of each prompt under each rule; raises if texts differ."""
    found: Runs = {name: {} for name in rules}
    for prompt in prompts:
        seconds: dict[str, list[float]] = {name: [] for name in rules}
        texts = set()
        for _ in range(repeats):
            for name, options in rules.items():
                given: Any = {**options(), "temperature": 0, "max_tokens": max_tokens}
                with model.start(as_request(prompt, chat=True), given, cold=True) as stream:
                    texts.add(tuple(token.id for token in stream))
                    seconds[name].append(stream.result.stats.decode_s)
        if len(texts) > 1:
            raise SpecRTError(f"the rules gave {len(texts)} texts for {prompt.text[:40]!r}: run 'specrt check'")
        for name, times in seconds.items():
            pair = len(next(iter(texts))), statistics.median(times)
            found[name].setdefault(prompt.category, []).append(pair)
    return found


def table(drafter: str, runs: Runs) -> str:
    """Return tokens/s by category and rule."""
    lines = [f"\n| {drafter} | {' | '.join(runs)} |", "|---" * (len(runs) + 1) + "|"]
    categories = list(runs[PLAIN])
    for category in (*categories, "all"):
        pairs = {name: found.get(category) or list(chain(*found.values())) for name, found in runs.items()}
        rates = {name: sum(n for n, _ in of) / sum(s for _, s in of) for name, of in pairs.items()}
        cells = (f"{rate:.0f}, {rate / rates[PLAIN]:.2f} x" for rate in rates.values())
        lines.append(f"| {category} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
