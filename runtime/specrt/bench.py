"""`specrt bench`: plain and speculative decoding side by side, on the same prompts in the same run.

The settings of a prompt run one after the other and the whole is repeated, so that a machine that drifts slows
all of them alike; medians are reported with their spread. `plain-1` decodes with width-1 calls, the fastest
plain decoding there is, and is what speedups are measured against; `plain` is the loop with nothing proposed,
which has the same bits as every speculative setting.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.engine import Engine
from specrt.errors import SpecRTError
from specrt.language_model import LanguageModel
from specrt.prompts import BenchPrompt
from specrt.requests import Options
from specrt.stats import Statistics

PLAIN_ONE, PLAIN = "plain-1", "plain"
_WARM_UP = 8  # tokens


class OneRowEngine:
    """The same engine with width-1 calls for plain steps: another arithmetic, for comparison only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.vocab_size, self.capacity, self.verify_widths = engine.vocab_size, engine.capacity, (1,)

    @property
    def kv_length(self) -> int:
        """Tokens in the KV buffers."""
        return self._engine.kv_length

    def verify(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Feed one token; return its logits [1, V]."""
        (token,) = token_ids
        return self._engine.decode(token)[None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One setting over the prompts of one category.

    tokens_per_s: all tokens over all seconds after prefill, the median of the repeats taken per prompt.
    speedup: over `plain-1`, per token. rest: share of that time outside drafter and engine calls. spread:
    (slowest - fastest) / median of the repeats, the median over prompts.
    """

    category: str
    setting: str
    num_tokens: int
    tokens_per_s: float
    speedup: float
    block_efficiency: float
    acceptance_rate: float
    rest: float
    spread: float


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    k: int
    one_row: bool = False


def run_bench(
    model: LanguageModel, prompts: Sequence[BenchPrompt], *, ks: Sequence[int], drafter: str, repeats: int,
    options: Options, chat: bool, on_run: Callable[[], None],
) -> list[BenchRow]:  # fmt: skip
    """Measure plain-1, plain and the given ks; `on_run` is called after each run, `num_runs` times in all.

    Raises `SpecRTError` if a setting gives other tokens than plain decoding, where they must be the same.
    """
    settings = [_Setting(PLAIN_ONE, 0, one_row=True), _Setting(PLAIN, 0), *(_Setting(f"k={k}", k) for k in ks)]
    runs: dict[tuple[str, str], list[list[Statistics]]] = {}
    for setting in settings:  # binds calls and brings weights into memory, which no measured run should pay for
        _run(model, prompts[0], setting, drafter, {**options, "max_tokens": _WARM_UP}, chat=chat)
    for prompt in prompts:
        measured: dict[str, list[Statistics]] = {setting.name: [] for setting in settings}
        expected: tuple[int, ...] | None = None
        for _ in range(repeats):
            for setting in settings:
                ids, stats = _run(model, prompt, setting, drafter, options, chat=chat)
                on_run()
                measured[setting.name].append(stats)
                if not setting.one_row and options.get("coupling") != "rejection":
                    expected = expected or ids
                    if ids != expected:
                        raise SpecRTError(
                            f"{setting.name} gave other tokens than plain on {prompt.text[:40]!r}: run 'specrt check'"
                        )
        for name, stats_of_runs in measured.items():
            for category in {prompt.category, "all"}:
                runs.setdefault((category, name), []).append(stats_of_runs)
    categories = dict.fromkeys([*(prompt.category for prompt in prompts), "all"])
    return [_row(category, setting.name, runs) for category in categories for setting in settings]


def num_runs(num_prompts: int, ks: Sequence[int], repeats: int) -> int:
    """Return how often `run_bench` calls `on_run`."""
    return num_prompts * (len(ks) + 2) * repeats


def format_table(rows: Sequence[BenchRow]) -> str:
    """Return the rows as a text table."""
    width = max(len("category"), *(len(row.category) for row in rows))
    head = f"{'category':<{width}}  setting   tokens/s  speedup  block eff.  accepted   rest  spread"
    lines = [head, "-" * len(head)]
    previous = rows[0].category
    for row in rows:
        if row.category != previous:
            lines.append("")
        previous = row.category
        lines.append(
            f"{row.category:<{width}}  {row.setting:<8} {row.tokens_per_s:>9.1f} {row.speedup:>7.2f}x "
            f"{row.block_efficiency:>11.2f} {row.acceptance_rate:>9.0%} {row.rest:>6.1%} {row.spread:>7.0%}"
        )
    return "\n".join(lines)


def _run(model: LanguageModel, prompt: BenchPrompt, setting: _Setting, drafter: str, options: Options, *,
         chat: bool) -> tuple[tuple[int, ...], Statistics]:  # fmt: skip
    given: Options = {"seed": 0, **options, "k": setting.k, "drafter": drafter}
    text = [{"role": "user", "content": prompt.text}] if chat else prompt.text
    engine: Any = OneRowEngine(model.target) if setting.one_row else None
    with model.start(text, given, target=engine, cold=True) as stream:
        for _ in stream:
            pass
        return stream.result.token_ids, stream.result.stats


def _row(category: str, setting: str, runs: dict[tuple[str, str], list[list[Statistics]]]) -> BenchRow:
    prompts = runs[category, setting]
    seconds = [statistics.median(run.decode_s for run in repeats) for repeats in prompts]
    spreads = [
        (max(s) - min(s)) / statistics.median(s)
        for repeats in prompts
        if (s := [r.decode_s for r in repeats]) and max(s) > 0
    ]
    firsts = [repeats[0] for repeats in prompts]
    every = [run for repeats in prompts for run in repeats]
    tokens = sum(stats.num_tokens for stats in firsts)
    rate = tokens / sum(seconds) if sum(seconds) else 0.0
    base = rate if setting == PLAIN_ONE else _row(category, PLAIN_ONE, runs).tokens_per_s
    proposed, steps = sum(stats.num_proposed for stats in firsts), sum(stats.num_steps for stats in firsts)
    return BenchRow(
        category=category, setting=setting, num_tokens=tokens, tokens_per_s=rate, speedup=rate / base if base else 0.0,
        block_efficiency=tokens / steps if steps else 0.0,
        acceptance_rate=sum(stats.num_accepted for stats in firsts) / proposed if proposed else 0.0,
        rest=sum(run.rest_s for run in every) / max(1e-12, sum(run.decode_s for run in every)),
        spread=statistics.median(spreads) if spreads else 0.0,
    )  # fmt: skip
