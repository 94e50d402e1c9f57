"""`specrt bench`: plain and speculative decoding side by side, on the same prompts in the same run.

A setting is a drafter with a k. The settings of a prompt run one after the other and the whole is repeated, so that a
machine that drifts slows all of them alike; medians are reported with their spread. `plain-1` decodes with width-1
calls, the fastest plain decoding there is, and is what speedups are measured against; `plain` is the loop with nothing
proposed, which has the same bits as every speculative setting.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from specrt.engine import Engine
from specrt.errors import SpecRTError
from specrt.language_model import LanguageModel
from specrt.machine import time_calls
from specrt.prompts import BenchPrompt, as_request, check_prompts
from specrt.replay import replay
from specrt.requests import Options, prompt_ids
from specrt.rows import Rows
from specrt.stats import PartCounts, Statistics, describe_parts

PLAIN_ONE, PLAIN = "plain-1", "plain"
_WARM_UP = 8  # tokens
_CONTEXT, _CALLS = 256, 5  # of the calls timed before each prompt, which its replays are charged with


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

    def verify(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> Rows:
        """Feed one token; return its logits [1, V]."""
        (token,) = token_ids
        return (self._engine.decode(token),)

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
    draft_s, verify_s, rest_s: seconds per token, the mean over all runs. hint: a remark where speculation did not help.
    parts: drafts, proposed and accepted tokens of each part of a combined drafter, over all runs.
    predicted: tokens_per_s by replay (`specrt.replay`), None unless asked for. tree: whether guesses branch.
    num_other_texts: prompts on which trees gave another text than plain decoding, which a near tie can do to them.
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
    draft_s: float
    verify_s: float
    rest_s: float
    hint: str | None
    parts: dict[str, PartCounts]
    predicted: float | None = None
    tree: bool = False
    num_other_texts: int = 0

    @property
    def remarks(self) -> list[str]:
        """What there is to say in words: the share of each part of a combined drafter, other texts, and the hint."""
        by_part = [f"accepted by part: {describe_parts(self.parts)}"] if self.parts else []
        others = f"{self.num_other_texts} prompts with another text than plain (near ties; not with --strict)"
        return by_part + ([others] if self.num_other_texts else []) + ([self.hint] if self.hint else [])


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    drafter: str | None = None
    k: int | Literal["auto"] | None = None
    tree: bool = False


_Runs = dict[tuple[str, str], list[list[Statistics]]]  # (category, setting) -> repeats per prompt


def run_bench(
    model: LanguageModel, prompts: Sequence[BenchPrompt], *, drafters: Sequence[str],
    ks: Sequence[int | Literal["auto"]], repeats: int, options: Options, chat: bool, on_run: Callable[[], None],
    predict: bool = False, trees: Collection[str] = (),
) -> list[BenchRow]:  # fmt: skip
    """Measure plain-1, plain and each drafter at each k; `on_run` is called after each of `num_runs` runs.

    trees: drafters that are measured with trees as well. predict: also replay every text in every setting but `plain-1`
    and those of heads; not with coupling `rejection`, where a text is one of many that a setting may give.

    Raises `SpecRTError` if a setting gives other tokens than plain decoding, where they must be the same.
    """
    settings = _settings(drafters, ks, trees)
    runs: _Runs = {}
    for setting in settings:  # binds calls and brings weights into memory, which no measured run should pay for
        _run(model, prompts[0], setting, {**options, "max_tokens": _WARM_UP}, chat=chat)
    check_prompts(model, prompts, options, chat=chat)
    same = options.get("coupling") != "rejection"
    replays: dict[tuple[str, str], list[Statistics]] = {}
    others: Counter[tuple[str, str]] = Counter()
    for prompt in prompts:
        call_s = time_calls(model.target, context=_CONTEXT, calls=_CALLS, clock=time.perf_counter) if predict else {}
        ids, measured = _measure(model, prompt, settings, options, repeats=repeats, same=same, chat=chat, on_run=on_run)
        for setting in settings:
            for category in {prompt.category, "all"}:
                runs.setdefault((category, setting.name), []).append(measured[setting.name])
                others[category, setting.name] += setting.tree and same and ids[setting.name] != ids[PLAIN]
            if (
                predict
                and same
                and setting.name != PLAIN_ONE
                and not model.manifest.reads_target(setting.drafter or "")
            ):
                replayed = _replay(model, prompt, setting, options, ids[PLAIN], call_s, chat=chat)
                for category in {prompt.category, "all"}:
                    replays.setdefault((category, setting.name), []).append(replayed)
    categories = dict.fromkeys([*(prompt.category for prompt in prompts), "all"])
    rows = [_row(category, setting, runs) for category in categories for setting in settings]
    predicted = {where: Statistics.combined(stats).tokens_per_s for where, stats in replays.items()}
    return [
        replace(row, predicted=predicted.get(key), num_other_texts=others[key])
        for row in rows
        if (key := (row.category, row.setting))
    ]


def num_runs(
    num_prompts: int, drafters: Sequence[str], ks: Sequence[int | Literal["auto"]], repeats: int,
    trees: Collection[str] = (),
) -> int:  # fmt: skip
    """Return how often `run_bench` calls `on_run`."""
    return num_prompts * ((len(drafters) + len(trees)) * len(ks) + 2) * repeats


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
    hints = [f"{row.setting}: {text}" for row in rows if row.category == "all" for text in row.remarks]
    return "\n".join([*lines, *([""] if hints else []), *hints])


def _settings(
    drafters: Sequence[str], ks: Sequence[int | Literal["auto"]], trees: Collection[str]
) -> list[_Setting]:  # fmt: skip
    found = [_Setting(PLAIN_ONE), _Setting(PLAIN)]
    for drafter in drafters:
        found += [_Setting(f"{drafter} k={k}", drafter, k) for k in ks]
        found += [_Setting(f"{drafter} tree k={k}", drafter, k, tree=True) for k in ks if drafter in trees]
    return found


def _measure(
    model: LanguageModel, prompt: BenchPrompt, settings: Sequence[_Setting], options: Options, *, repeats: int,
    same: bool, chat: bool, on_run: Callable[[], None],
) -> tuple[dict[str, tuple[int, ...]], dict[str, list[Statistics]]]:  # fmt: skip
    """Run a prompt in every setting in turn; return texts and statistics by setting.

    Texts have to be the `same` in all but `plain-1`, and trees that are not strict.
    """
    measured: dict[str, list[Statistics]] = {setting.name: [] for setting in settings}
    texts: dict[str, tuple[int, ...]] = {}
    for _ in range(repeats):
        for setting in settings:
            ids, stats = _run(model, prompt, setting, options, chat=chat)
            on_run()
            measured[setting.name].append(stats)
            texts.setdefault(setting.name, ids)
            exact = setting.name != PLAIN_ONE and (options.get("strict") or not setting.tree)
            if same and exact and ids != texts[PLAIN]:
                raise SpecRTError(
                    f"{setting.name} gave other tokens than plain on {prompt.text[:40]!r}: run 'specrt check'"
                )
    return texts, measured


def _run(model: LanguageModel, prompt: BenchPrompt, setting: _Setting, options: Options, *,
         chat: bool) -> tuple[tuple[int, ...], Statistics]:  # fmt: skip
    engine: Any = OneRowEngine(model.target) if setting.name == PLAIN_ONE else None
    with model.start(as_request(prompt, chat=chat), _options(options, setting), target=engine, cold=True) as stream:
        for _ in stream:
            pass
        return stream.result.token_ids, stream.result.stats


def _replay(
    model: LanguageModel, prompt: BenchPrompt, setting: _Setting, options: Options, ids: Sequence[int],
    call_s: Mapping[int, float], *, chat: bool,
) -> Statistics:  # fmt: skip
    given = _options(options, setting)
    start = prompt_ids(
        as_request(prompt, chat=chat), model.tokenizer, vocab_size=model.target.vocab_size,
        capacity=model.target.capacity, template_kwargs=given.pop("chat_template_kwargs", None),
    )  # fmt: skip
    return replay(model, start, ids, given, call_s=call_s)


def _options(options: Options, setting: _Setting) -> Options:
    return {"seed": 0, **options, "drafter": setting.drafter or "none", "k": setting.k or 0, "tree": setting.tree}


def _row(category: str, setting: _Setting, runs: _Runs) -> BenchRow:
    prompts = runs[category, setting.name]
    spreads = [
        (max(s) - min(s)) / statistics.median(s)
        for repeats in prompts
        if (s := [r.decode_s for r in repeats]) and max(s) > 0
    ]
    every = Statistics.combined([run for repeats in prompts for run in repeats])
    one_row = Statistics.combined([run for repeats in runs[category, PLAIN_ONE] for run in repeats])
    tokens, rate = every.num_tokens, _tokens_per_s(prompts)
    over_plain = _ratio(rate, _tokens_per_s(runs[category, PLAIN]))
    draft_s, call_s = _ratio(every.draft_s, every.num_proposed), _ratio(one_row.verify_s, one_row.num_steps)
    return BenchRow(
        category=category, setting=setting.name, drafter=setting.drafter, k=setting.k, tree=setting.tree,
        num_tokens=sum(repeats[0].num_tokens for repeats in prompts), tokens_per_s=rate,
        speedup=_ratio(rate, _tokens_per_s(runs[category, PLAIN_ONE])),
        over_plain=over_plain,
        block_efficiency=every.block_efficiency, acceptance_rate=every.acceptance_rate,
        acceptance_by_position=tuple(map(_ratio, every.accepted_by_position, every.proposed_by_position)),
        draft_cost_ratio=_ratio(draft_s, call_s), rest=_ratio(every.rest_s, every.decode_s),
        spread=statistics.median(spreads) if spreads else 0.0, draft_s=_ratio(every.draft_s, tokens),
        verify_s=_ratio(every.verify_s, tokens), rest_s=_ratio(every.rest_s, tokens),
        hint=every.hint if over_plain < 1 else None, parts=every.parts,
    )  # fmt: skip


def _tokens_per_s(prompts: Sequence[Sequence[Statistics]]) -> float:
    """Return the tokens of one run of each prompt over the sum of its median seconds."""
    seconds = sum(statistics.median(run.decode_s for run in repeats) for repeats in prompts)
    return _ratio(sum(repeats[0].num_tokens for repeats in prompts), seconds)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
