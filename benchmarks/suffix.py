"""What the suffix drafter costs, and what it brings beside n-gram lookup, with and without outputs of earlier requests.

python -m benchmarks.suffix costs
python -m benchmarks.suffix run artifacts/smollm2-int8 --prompts prompts.jsonl
python -m benchmarks.suffix run artifacts/smollm2-int8 -k 15 --repeats 1 --call-ms 5.2,5.9,6.7,8.4,10.4

`specrt bench` cannot measure the cache: it runs each prompt several times. Here a repeat runs every prompt once, in the
order of the file, and begins with an empty cache. With --call-ms the target speaks once and is then replayed: what
drafting itself takes is left out, and the load of the machine does not matter.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from specrt.drafters import Drafter
from specrt.drafters.ngram import NgramDrafter
from specrt.drafters.suffix import SuffixCache, SuffixDrafter
from specrt.language_model import LanguageModel, load
from specrt.prompts import BenchPrompt, load_prompts
from specrt.replay import Transcript
from specrt.requests import Options
from specrt.sampling import Sampler, SamplingParams

_WIDTHS = (2, 4, 6, 10, 16)
_STEPS = 500
_SETTINGS: dict[str, Options] = {
    "ngram": {"drafter": "ngram"},
    "suffix": {"drafter": "suffix"},
    "suffix, cache": {"drafter": "suffix", "suffix_cache": True},
}


@click.group()
def main() -> None:
    """Measure the suffix drafter."""


@main.command()
@click.option("--lengths", default="2000,100000", show_default=True, help="Tokens before the measured proposals.")
def costs(lengths: str) -> None:
    """Time indexing and proposing, one token after the other, in a text of frequent tokens and repeated passages."""
    click.echo("drafter         tokens  index us/token  propose us: median     90 %")
    for length in map(int, lengths.split(",")):
        text = make_text(length + _STEPS)
        cache = SuffixCache(limit=length)
        cache.add(make_text(length, seed=1))
        drafters: dict[str, Drafter] = {
            "ngram": NgramDrafter(),
            "suffix": SuffixDrafter(widths=_WIDTHS),
            "suffix, cache": SuffixDrafter(widths=_WIDTHS, cache=cache),
        }
        for name, drafter in drafters.items():
            index, median, most = time_drafter(drafter, text, length)
            click.echo(f"{name:<14} {length:>7} {index:>15.2f} {median:>19.1f} {most:>8.1f}")


def make_text(length: int, *, seed: int = 0) -> list[int]:
    """Return tokens drawn by Zipf's law, of which about a third come in passages that occurred before."""
    rng = np.random.default_rng(seed)
    text: list[int] = rng.zipf(1.2, 64).tolist()
    while len(text) < length:
        start = int(rng.integers(0, len(text) - 30))
        text += text[start : start + int(rng.integers(4, 30))]
        text += np.minimum(rng.zipf(1.2, 34), 49_151).tolist()
    return text[:length]


def time_drafter(drafter: Drafter, text: Sequence[int], length: int) -> tuple[float, float, float]:
    """Return microseconds of processor time: indexing per token, a proposal in the median, the slowest tenth."""
    sampler = Sampler(SamplingParams(), list(text[:1]), vocab_size=49_152, end_ids=())
    started = time.thread_time()
    drafter.start(text[:length], sampler)
    drafter.propose(text[:length], 15)
    index_s = time.thread_time() - started
    seconds = []
    for end in range(length + 1, length + _STEPS):
        known = text[:end]
        started = time.thread_time()
        drafter.propose(known, 15)
        seconds.append(time.thread_time() - started)
    return 1e6 * index_s / length, 1e6 * statistics.median(seconds), 1e6 * float(np.quantile(seconds, 0.9))


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON lines as for 'specrt bench'.")
@click.option("--limit", type=click.IntRange(min=1), help="Prompts per category.")
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("-k", "k", default="auto", show_default=True)
@click.option("--call-ms", metavar="MS,...", help="Replay with these times of a call, one per verify width.")
@click.option("--threads", type=click.IntRange(min=1))
def run(
    artifact: Path, prompts: Path | None, limit: int | None, max_tokens: int, repeats: int, k: str, call_ms: str | None,
    threads: int | None,
) -> None:  # fmt: skip
    """Run every prompt with each drafter in turn, greedily; tokens/s per category, medians of the repeats."""
    with load(artifact, threads=threads) as model:
        texts = _fitting(model, load_prompts(prompts, limit=limit), max_tokens)
        options: Options = {"k": "auto" if k == "auto" else int(k), "max_tokens": max_tokens, "temperature": 0.0}
        times = [float(ms) / 1e3 for ms in call_ms.split(",")] if call_ms else []
        call_s = dict(zip(model.target.verify_widths, times, strict=bool(times)))
        rounds = [list(_round(model, texts, options, call_s)) for _ in range(repeats)]
    seconds: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    counts: dict[tuple[str, str, int], tuple[int, int]] = {}
    for key, decode_s, num_tokens, num_steps in (run for one in rounds for run in one):
        seconds[key].append(decode_s)
        counts[key] = num_tokens, num_steps
    for category in dict.fromkeys([*(text.category for text in texts), "all"]):
        for name in _SETTINGS:
            keys = [key for key in counts if key[0] == name and category in ("all", key[1])]
            total_s = sum(statistics.median(seconds[key]) for key in keys)
            tokens, steps = (sum(counts[key][i] for key in keys) for i in (0, 1))
            click.echo(f"{category:<18} {name:<14} {tokens / total_s:>8.1f} tokens/s, block eff. {tokens / steps:.2f}")


def _fitting(model: LanguageModel, prompts: Sequence[BenchPrompt], max_tokens: int) -> list[BenchPrompt]:
    room = model.target.capacity - max_tokens
    return [p for p in prompts if len(model.tokenizer.encode(model.tokenizer.render(_messages(p), None))) <= room]


def _messages(prompt: BenchPrompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt.text}]


def _round(
    model: LanguageModel, prompts: Sequence[BenchPrompt], options: Options, call_s: Mapping[int, float]
) -> Iterator[tuple[tuple[str, str, int], float, int, int]]:
    """Yield (setting, category, number), seconds, tokens and steps of every run; all settings must give one text."""
    model.suffix_cache.clear()
    for number, prompt in enumerate(prompts):
        texts = set()
        ids = model.tokenizer.encode(model.tokenizer.render(_messages(prompt), None), add_special_tokens=False)
        spoken = model.generate(ids, **options).token_ids if call_s else ()
        for name, setting in _SETTINGS.items():
            script: Any = Transcript(model.target, [*ids, *spoken], call_s, real=lambda: 0.0) if call_s else None
            clock = script.clock if script else None
            with model.start(ids, {**options, **setting}, target=script, clock=clock) as stream:
                texts.add(tuple(token.id for token in stream))
                stats = stream.result.stats
            yield (name, prompt.category, number), stats.decode_s, stats.num_tokens, stats.num_steps
        if len(texts) != 1:
            raise click.ClickException(f"prompt {number}: settings gave different texts: run 'specrt check'")


if __name__ == "__main__":
    main()
