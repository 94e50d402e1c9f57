"""`specrt tune`: find out which drafter and k pay on this machine, for these texts.

1. Calls of every verify width are timed, in turn, behind a context of usual length.
2. The target writes each prompt's text once, plainly.
3. Every drafter replays the texts at every k of the ladder and with adaptive k (`specrt.replay`): how many tokens each
   step would have brought is exact, drafters are timed as they run, calls cost what they were measured to.
4. The best few and plain decoding run for real, alternating, and with adaptive k the drafters that cannot be replayed,
   because they read what the target computes; the fastest is the choice.
"""

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

from specrt.cost_model import call_seconds, popular_speedup, seconds_per_step, tokens_per_step
from specrt.errors import SpecRTError
from specrt.language_model import LanguageModel
from specrt.machine import time_calls
from specrt.prompts import BenchPrompt, as_request, check_prompts
from specrt.replay import replay
from specrt.requests import Options, prompt_ids
from specrt.stats import Statistics

CONFIRMED = 3
_CONTEXT, _CALLS = 256, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A drafter with a k; plain decoding is `none` with k = 0. tree: guesses may branch; texts keep their bits."""

    drafter: str
    k: int | Literal["auto"]
    tree: bool = False

    def __str__(self) -> str:
        shape = " tree" if self.tree else ""
        return "plain" if self.drafter == "none" else f"{self.drafter} k={self.k}{shape}"


PLAIN = Setting(drafter="none", k=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedRow:
    """One setting. Tokens per second: predicted by replay, over all texts and by category; measured where it was run.

    predicted: None, and by_category empty, for a drafter that cannot be replayed.

    formula, popular: speedups over plain by `specrt.cost_model`, from the shares of accepted positions at the largest
    k, and by the formula that leaves out half of it; None for adaptive k.

    tokens_per_step and draft_s (seconds of drafting per step) are the replay's if there was one. speedup: measured over
    plain, if it was run, else predicted. spread: (slowest - fastest) / median of the measured repeats.
    """

    setting: Setting
    predicted: float | None
    by_category: dict[str, float]
    tokens_per_step: float
    draft_s: float
    formula: float | None = None
    popular: float | None = None
    measured: float | None = None
    spread: float | None = None
    speedup: float = 1.0

    @property
    def tokens_per_s(self) -> float:
        """What was measured, else predicted."""
        return self.measured or self.predicted or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """Everything that was measured, fastest setting first, and the choice.

    call_s: seconds of a verify call by width. acceptance: share of steps in which the guess at each position was right,
    by drafter, at the largest k. too_slow: settings whose steps take longer than `max_step_ms`.
    """

    call_s: dict[int, float]
    max_step_ms: float | None
    acceptance: dict[str, list[float]]
    rows: tuple[TunedRow, ...]
    too_slow: tuple[Setting, ...]
    choice: Setting

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Text:
    category: str
    prompt: list[int]
    token_ids: tuple[int, ...]


def run_tune(
    model: LanguageModel, prompts: Sequence[BenchPrompt], *, drafters: Sequence[str], repeats: int, options: Options,
    chat: bool, on_run: Callable[[], None], trees: Collection[str] = (),
) -> TuneReport:  # fmt: skip
    """Measure and choose; `on_run` is called at most `num_runs` times.

    trees: drafters that are tried with trees as well. These are strict, so that a choice never costs a text its bits.
    """
    check_prompts(model, prompts, options, chat=chat)
    call_s = time_calls(model.target, context=_CONTEXT, calls=_CALLS, clock=time.perf_counter)
    texts = []
    for prompt in prompts:
        texts.append(_write(model, prompt, options, chat=chat))
        on_run()
    ks: list[int | Literal["auto"]] = [*(width - 1 for width in call_s), "auto"]
    shapes = [(name, tree) for name in drafters for tree in (False, True)[: 1 + (name in trees)]]
    live = [Setting(drafter=name, k="auto", tree=tree) for name, tree in shapes if model.manifest.reads_target(name)]
    replayable = [(name, tree) for name, tree in shapes if not model.manifest.reads_target(name)]
    settings = [PLAIN, *(Setting(drafter=name, k=k, tree=tree) for name, tree in replayable for k in ks)]
    replayed: dict[Setting, list[Statistics]] = {}
    for setting in settings:
        replayed[setting] = [_replay(model, text, setting, options, call_s) for text in texts]
        on_run()
    limit_s = (options.get("max_step_ms") or math.inf) / 1e3
    too_slow = tuple(s for s in settings[1:] if s.k != "auto" and _step_s(s.k, replayed[s], call_s) > limit_s)
    rows = [
        _by_formula(_row(s, replayed[s], texts), replayed[s], replayed.get(replace(s, k=ks[-2]), []), call_s)
        for s in settings
        if s not in too_slow
    ]
    rows.sort(key=lambda row: -row.tokens_per_s)
    finalists = [PLAIN, *[row.setting for row in rows if row.setting != PLAIN][:CONFIRMED], *live]
    done = _confirm(model, texts, rows, finalists, options, repeats=repeats, on_run=on_run)
    choice = max((row for row in done if row.measured is not None), key=lambda row: row.tokens_per_s).setting
    return TuneReport(
        call_s=call_s, max_step_ms=options.get("max_step_ms"),
        acceptance={
            name: _accepted(replayed[Setting(drafter=name, k=ks[-2])]) for name, tree in replayable if not tree
        },
        rows=done, too_slow=too_slow, choice=choice,
    )  # fmt: skip


def num_runs(num_prompts: int, num_drafters: int, num_widths: int, repeats: int, num_live: int = 0) -> int:
    """Return at most how often `run_tune` calls `on_run`; a drafter of trees counts twice.

    num_live: drafters beside the others, which cannot be replayed.
    """
    return num_prompts + 1 + num_drafters * (num_widths + 1) + num_prompts * repeats * (CONFIRMED + 1 + num_live)


def format_report(report: TuneReport) -> str:
    """Return the report as a page of text."""
    calls = ", ".join(f"{width} rows {1e3 * seconds:.2f}" for width, seconds in report.call_s.items())
    lines = [f"verify calls in ms: {calls}", ""]
    for drafter, shares in report.acceptance.items():
        lines.append(f"{drafter}, accepted by position: {' '.join(f'{share:.0%}' for share in shares)}")
    head = "setting               predicted  measured  speedup  tokens/step  draft ms  spread  formula  k a/(1+c)"
    lines += ["", head, "-" * len(head)]
    for row in report.rows:
        predicted, measured = ("-" if rate is None else f"{rate:.1f}" for rate in (row.predicted, row.measured))
        spread = "-" if row.spread is None else f"{row.spread:.0%}"
        lines.append(
            f"{row.setting!s:<20} {predicted:>10} {measured:>9} {row.speedup:>7.2f}x "
            f"{row.tokens_per_step:>12.2f} {1e3 * row.draft_s:>9.2f} {spread:>7} "
            f"{_times(row.formula):>8} {_times(row.popular):>10}"
        )
    if report.too_slow:
        lines.append(f"steps longer than {report.max_step_ms:g} ms: {', '.join(map(str, report.too_slow))}")
    lines += ["", _verdict(report)]
    return "\n".join(lines)


def _times(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.2f}x"


def _verdict(report: TuneReport) -> str:
    chosen = next(row for row in report.rows if row.setting == report.choice)
    if report.choice == PLAIN:
        return "no speculation is best here: no setting was faster than plain decoding"
    return f"best: {report.choice}, {chosen.measured:.1f} tokens/s, {chosen.speedup:.2f}x plain decoding"


def _write(model: LanguageModel, prompt: BenchPrompt, options: Options, *, chat: bool) -> _Text:
    text = as_request(prompt, chat=chat)
    engine = model.target
    ids = prompt_ids(text, model.tokenizer, vocab_size=engine.vocab_size, capacity=engine.capacity)
    with model.start(ids, _options(options, PLAIN)) as stream:
        return _Text(prompt.category, ids, tuple(token.id for token in stream))


def _replay(
    model: LanguageModel, text: _Text, setting: Setting, options: Options, call_s: Mapping[int, float]
) -> Statistics:
    return replay(model, text.prompt, text.token_ids, _options(options, setting), call_s=call_s)


def _run(model: LanguageModel, text: _Text, setting: Setting, options: Options) -> Statistics:
    with model.start(text.prompt, _options(options, setting), cold=True) as stream:
        ids = tuple(token.id for token in stream)
        if ids != text.token_ids:
            raise SpecRTError(f"{setting} gave other tokens than plain decoding: run 'specrt check'")
        return stream.result.stats


def _options(options: Options, setting: Setting) -> Options:
    given: Options = {"seed": 0, **options, "drafter": setting.drafter, "k": setting.k}
    if setting.k != "auto":
        given.pop("max_step_ms", None)
    if setting.tree:
        given |= {"tree": True, "strict": True}
    return given


def _confirm(
    model: LanguageModel, texts: Sequence[_Text], rows: Sequence[TunedRow], finalists: Sequence[Setting],
    options: Options, *, repeats: int, on_run: Callable[[], None],
) -> tuple[TunedRow, ...]:  # fmt: skip
    """Run the finalists for real, one after the other on each text; return all rows, those with what was measured."""
    seconds: dict[Setting, list[list[float]]] = {setting: [] for setting in finalists}
    latest: dict[Setting, list[Statistics]] = {setting: [] for setting in finalists}
    for text in texts:
        runs: dict[Setting, list[Statistics]] = {setting: [] for setting in finalists}
        for _ in range(repeats):
            for setting in finalists:
                runs[setting].append(_run(model, text, setting, options))
                on_run()
        for setting in finalists:
            seconds[setting].append([stats.decode_s for stats in runs[setting]])
            latest[setting].append(runs[setting][-1])
    known = {row.setting for row in rows}
    rows = [
        *rows,
        *(replace(_row(s, latest[s], texts), predicted=None, by_category={}) for s in finalists if s not in known),
    ]
    tokens = sum(len(text.token_ids) for text in texts)
    rates = {s: tokens / sum(statistics.median(run) for run in seconds[s]) for s in finalists}
    plain = next(row.tokens_per_s for row in rows if row.setting == PLAIN)
    done = []
    for row in rows:
        if row.setting not in rates:
            done.append(replace(row, speedup=row.tokens_per_s / plain))
            continue
        spread = statistics.median((max(run) - min(run)) / statistics.median(run) for run in seconds[row.setting])
        rate = rates[row.setting]
        done.append(replace(row, measured=rate, spread=spread, speedup=rate / rates[PLAIN]))
    return tuple(sorted(done, key=lambda row: -row.tokens_per_s))


def _row(setting: Setting, stats: Sequence[Statistics], texts: Sequence[_Text]) -> TunedRow:
    def rate(category: str | None) -> float:
        wanted = [s for s, text in zip(stats, texts, strict=True) if category in (None, text.category)]
        return sum(s.num_tokens for s in wanted) / max(1e-9, sum(s.decode_s for s in wanted))

    steps = max(1, sum(s.num_steps for s in stats))
    return TunedRow(
        setting=setting, predicted=rate(None), by_category={name: rate(name) for name in {t.category for t in texts}},
        tokens_per_step=sum(s.num_tokens for s in stats) / steps, draft_s=sum(s.draft_s for s in stats) / steps,
    )  # fmt: skip


def _by_formula(
    row: TunedRow, stats: Sequence[Statistics], widest: Sequence[Statistics], call_s: Mapping[int, float]
) -> TunedRow:
    """Add what formulas say of chains of a fixed k; `widest` are the statistics of its drafter at the largest k."""
    k = row.setting.k
    if k == "auto" or not widest or row.setting.tree:
        return row
    accepted = _accepted(widest)
    proposed = _shares([s.proposed_by_position for s in widest], widest)
    plain_s = call_seconds(call_s, 1)
    rate = sum(s.num_accepted for s in stats) / max(1, sum(s.num_proposed for s in stats))
    formula = tokens_per_step(accepted, k) * plain_s / seconds_per_step(proposed, call_s, k, row.draft_s)
    return replace(row, formula=formula, popular=popular_speedup(rate, k, row.draft_s / plain_s))


def _step_s(k: int, stats: Sequence[Statistics], call_s: Mapping[int, float]) -> float:
    """Return the seconds of a step that guesses k tokens: the call, and the drafting of a step in the mean."""
    return call_seconds(call_s, k + 1) + sum(s.draft_s for s in stats) / max(1, sum(s.num_steps for s in stats))


def _accepted(stats: Sequence[Statistics]) -> list[float]:
    return _shares([s.accepted_by_position for s in stats], stats)


def _shares(counts: Sequence[Sequence[int]], stats: Sequence[Statistics]) -> list[float]:
    steps = max(1, sum(s.num_steps for s in stats))
    return [sum(column) / steps for column in zip_longest(*counts, fillvalue=0)]
