"""`specrt bench`: plain and speculative decoding side by side, on the same prompts in the same run.

A setting is a drafter with a k. The settings of a prompt run one after the other and the whole is repeated, so that a
machine that drifts slows all of them alike; medians are reported with their spread. `plain-1` decodes with width-1
calls, the fastest plain decoding there is, and is what speedups are measured against; `plain` is the loop with nothing
proposed, which has the same bits as every speculative setting.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
        self.takes_trees = False

    @property
    def kv_length(self) -> int:
        """Tokens in the KV buffers."""
        return self._engine.kv_length

    def verify(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Feed one token; return its logits [1, V]."""
        (token,) = token_ids
        return self._engine.decode(token)[None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One setting over the prompts of one category.

    drafter and k are None for plain settings. tokens_per_s: all tokens over all seconds after prefill, of each prompt
    the median of its repeats. speedup: over `plain-1`, per token; over_plain: over `plain`. acceptance_by_position: how
    many of the first, second, ... guesses of a proposal were accepted, of those that were proposed. draft_cost_ratio:
    seconds of drafting per proposed token over those of a call of width 1. rest: share of the time after prefill
    outside drafter and engine calls. spread: (slowest - fastest) / median of the repeats, the median over prompts.
    """

    category: str
    setting: str
    drafter: str | None
    k: int | Literal["auto"] | None
    num_tokens: int
    tokens_per_s: float
    speedup: float
    over_plain: float
    block_efficiency: float
    acceptance_rate: float
    acceptance_by_position: tuple[float, ...]
    draft_cost_ratio: float
    rest: float
    spread: float


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    drafter: str | None = None
    k: int | Literal["auto"] | None = None


_Runs = dict[tuple[str, str], list[list[Statistics]]]  # (category, setting) -> repeats per prompt


def run_bench(
    model: LanguageModel, prompts: Sequence[BenchPrompt], *, drafters: Sequence[str],
    ks: Sequence[int | Literal["auto"]], repeats: int, options: Options, chat: bool, on_run: Callable[[], None],
) -> list[BenchRow]:  # fmt: skip
    """Measure plain-1, plain and each drafter at each k; `on_run` is called after each of `num_runs` runs.

    Raises `SpecRTError` if a setting gives other tokens than plain decoding, where they must be the same.
    """
    settings = [_Setting(PLAIN_ONE), _Setting(PLAIN)]
    settings += [_Setting(f"{drafter} k={k}", drafter, k) for drafter in drafters for k in ks]
    runs: _Runs = {}
    for setting in settings:  # binds calls and brings weights into memory, which no measured run should pay for
        _run(model, prompts[0], setting, {**options, "max_tokens": _WARM_UP}, chat=chat)
    for prompt in prompts:
        measured: dict[str, list[Statistics]] = {setting.name: [] for setting in settings}
        expected: tuple[int, ...] | None = None
        for _ in range(repeats):
            for setting in settings:
                ids, stats = _run(model, prompt, setting, options, chat=chat)
                on_run()
                measured[setting.name].append(stats)
                if setting.name != PLAIN_ONE and options.get("coupling") != "rejection":
                    expected = expected or ids
                    if ids != expected:
                        raise SpecRTError(
                            f"{setting.name} gave other tokens than plain on {prompt.text[:40]!r}: run 'specrt check'"
                        )
        for name, stats_of_runs in measured.items():
            for category in {prompt.category, "all"}:
                runs.setdefault((category, name), []).append(stats_of_runs)
    categories = dict.fromkeys([*(prompt.category for prompt in prompts), "all"])
    return [_row(category, setting, runs) for category in categories for setting in settings]


def num_runs(num_prompts: int, drafters: Sequence[str], ks: Sequence[int | Literal["auto"]], repeats: int) -> int:
    """Return how often `run_bench` calls `on_run`."""
    return num_prompts * (len(drafters) * len(ks) + 2) * repeats


def format_table(rows: Sequence[BenchRow]) -> str:
    """Return the rows as a text table; acceptance by position in percent."""
    width = max(len("category"), *(len(row.category) for row in rows))
    name = max(len("setting"), *(len(row.setting) for row in rows))
    positions = [" ".join(f"{share:.0%}".rstrip("%") for share in row.acceptance_by_position) for row in rows]
    last = max(len("by position"), *map(len, positions))
    head = (
        f"{'category':<{width}}  {'setting':<{name}}   tokens/s  speedup  over plain  block eff.  draft cost   rest  "
        f"spread  accepted  {'by position':<{last}}"
    )
    lines = [head, "-" * len(head)]
    previous = rows[0].category
    for row, shares in zip(rows, positions, strict=True):
        if row.category != previous:
            lines.append("")
        previous = row.category
        lines.append(
            f"{row.category:<{width}}  {row.setting:<{name}}  {row.tokens_per_s:>9.1f} {row.speedup:>7.2f}x "
            f"{row.over_plain:>10.2f}x {row.block_efficiency:>11.2f} {row.draft_cost_ratio:>11.3f} {row.rest:>6.1%} "
            f"{row.spread:>7.0%} {row.acceptance_rate:>9.0%}  {shares:<{last}}"
        )
    return "\n".join(lines)


def _run(model: LanguageModel, prompt: BenchPrompt, setting: _Setting, options: Options, *,
         chat: bool) -> tuple[tuple[int, ...], Statistics]:  # fmt: skip
    given: Options = {"seed": 0, **options, "drafter": setting.drafter or "none", "k": setting.k or 0}
    text = [{"role": "user", "content": prompt.text}] if chat else prompt.text
    engine: Any = OneRowEngine(model.target) if setting.name == PLAIN_ONE else None
    with model.start(text, given, target=engine, cold=True) as stream:
        for _ in stream:
            pass
        return stream.result.token_ids, stream.result.stats


def _row(category: str, setting: _Setting, runs: _Runs) -> BenchRow:
    prompts = runs[category, setting.name]
    spreads = [
        (max(s) - min(s)) / statistics.median(s)
        for repeats in prompts
        if (s := [r.decode_s for r in repeats]) and max(s) > 0
    ]
    every = [run for repeats in prompts for run in repeats]
    one_row = [run for repeats in runs[category, PLAIN_ONE] for run in repeats]
    tokens, steps = _total("num_tokens", every), _total("num_steps", every)
    proposed = _total("num_proposed", every)
    rate = _tokens_per_s(prompts)
    return BenchRow(
        category=category, setting=setting.name, drafter=setting.drafter, k=setting.k,
        num_tokens=sum(repeats[0].num_tokens for repeats in prompts), tokens_per_s=rate,
        speedup=_ratio(rate, _tokens_per_s(runs[category, PLAIN_ONE])),
        over_plain=_ratio(rate, _tokens_per_s(runs[category, PLAIN])),
        block_efficiency=_ratio(tokens, steps), acceptance_rate=_ratio(_total("num_accepted", every), proposed),
        acceptance_by_position=_by_position(every),
        draft_cost_ratio=_ratio(
            _ratio(_total("draft_s", every), proposed),
            _ratio(_total("verify_s", one_row), _total("num_steps", one_row)),
        ),
        rest=_ratio(_total("rest_s", every), _total("decode_s", every)),
        spread=statistics.median(spreads) if spreads else 0.0,
    )  # fmt: skip


def _tokens_per_s(prompts: Sequence[Sequence[Statistics]]) -> float:
    """Return the tokens of one run of each prompt over the sum of its median seconds."""
    seconds = sum(statistics.median(run.decode_s for run in repeats) for repeats in prompts)
    return _ratio(sum(repeats[0].num_tokens for repeats in prompts), seconds)


def _by_position(runs: Sequence[Statistics]) -> tuple[float, ...]:
    length = max(len(run.proposed_by_position) for run in runs)
    proposed, accepted = np.zeros(length), np.zeros(length)
    for run in runs:
        proposed[: len(run.proposed_by_position)] += run.proposed_by_position
        accepted[: len(run.accepted_by_position)] += run.accepted_by_position
    return tuple((accepted / proposed).tolist())  # a position is there because something was proposed


def _total(field: str, runs: Sequence[Statistics]) -> float:
    return float(sum(getattr(run, field) for run in runs))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
