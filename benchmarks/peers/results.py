"""From single runs to rates per setting, and to one line per peer and precision."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peers.protocol import PLAIN, PLAIN_ONE
from benchmarks.peers.quality import equal_share


@dataclass(frozen=True, slots=True)
class Lane:
    """One library with one form of the weights."""

    peer: str
    variant: str

    def __str__(self) -> str:
        return f"{self.peer} {self.variant}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One way of decoding. k: most tokens per proposal, 0 in modes that have none of their own."""

    mode: str
    k: int

    @property
    def is_plain(self) -> bool:
        """Whether nothing is guessed."""
        return self.mode in (PLAIN, PLAIN_ONE)

    def __str__(self) -> str:
        return f"{self.mode} k={self.k}" if self.k else self.mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One generation. idle_s: processor time that all other workers used meanwhile, None if unknown."""

    lane: Lane
    setting: Setting
    prompt: int
    category: str
    ids: tuple[int, ...]
    num_timed: int
    decode_s: float
    prompt_s: float
    idle_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """One setting of one lane.

    by_category: tokens/s per category: its prompts' tokens over their seconds, each the median of its repeats.
    tokens_per_s: mean of these. spread: (slowest - fastest) / median of the repeats, the median over prompts. equal:
    share of tokens before the first difference from the reference. as_plain: share of prompts with the same tokens as
    the lane's own plain decoding.
    """

    lane: Lane
    setting: Setting
    tokens_per_s: float
    spread: float
    equal: float
    as_plain: float
    by_category: dict[str, float]


@dataclass(slots=True, kw_only=True)
class LaneFacts:
    """What is known of a lane besides its runs."""

    kl: float | None = None
    num_bytes: int | None = None
    notes: list[str] = field(default_factory=list)


def setting_rows(runs: Sequence[Run], reference: Mapping[int, Sequence[int]]) -> list[SettingRow]:
    """Return a row per lane and setting, in the order in which they first ran; reference: token ids by prompt."""
    groups: dict[tuple[Lane, Setting], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.lane, run.setting), []).append(run)
    plain = {(run.lane, run.prompt): run.ids for run in runs if run.setting.mode == PLAIN}
    return [_row(lane, setting, group, reference, plain) for (lane, setting), group in groups.items()]


def best(rows: Sequence[SettingRow], lane: Lane) -> tuple[SettingRow | None, SettingRow | None]:
    """Return the lane's fastest plain row and its fastest speculative one."""
    own = [row for row in rows if row.lane == lane]
    plain, speculative = (
        max((row for row in own if row.setting.is_plain is wanted), key=lambda row: row.tokens_per_s, default=None)
        for wanted in (True, False)
    )
    return plain, speculative


def to_json(rows: Sequence[SettingRow], facts: Mapping[Lane, LaneFacts], runs: Sequence[Run]) -> dict[str, Any]:
    """Return everything that was measured: lanes, settings, single runs."""
    return {
        "lanes": [{**asdict(lane), **asdict(fact)} for lane, fact in facts.items()],
        "settings": [
            {**asdict(row.lane), **asdict(row.setting), **{k: v for k, v in asdict(row).items() if k not in _KEYS}}
            for row in rows
        ],
        "runs": [
            {**asdict(run.lane), **asdict(run.setting), **{k: v for k, v in asdict(run).items() if k not in _KEYS}}
            for run in runs
        ],
    }


_KEYS = ("lane", "setting")


def _row(
    lane: Lane, setting: Setting, runs: Sequence[Run], reference: Mapping[int, Sequence[int]],
    plain: Mapping[tuple[Lane, int], Sequence[int]],
) -> SettingRow:  # fmt: skip
    prompts: dict[int, list[Run]] = {}
    for run in runs:
        prompts.setdefault(run.prompt, []).append(run)
    seconds: dict[str, list[float]] = {}  # per token, by category
    spreads = []
    for repeats in prompts.values():
        costs = [run.decode_s / run.num_timed for run in repeats]
        middle = statistics.median(costs)
        seconds.setdefault(repeats[0].category, []).append(middle)
        spreads.append((max(costs) - min(costs)) / middle)
    by_category = {category: len(costs) / sum(costs) for category, costs in seconds.items()}
    firsts = [repeats[0] for repeats in prompts.values()]
    return SettingRow(
        lane=lane, setting=setting, tokens_per_s=statistics.fmean(by_category.values()),
        spread=statistics.median(spreads), by_category=by_category,
        equal=statistics.fmean(equal_share(run.ids, reference[run.prompt]) for run in firsts),
        as_plain=statistics.fmean(tuple(plain.get((lane, run.prompt), ())) == run.ids for run in firsts),
    )  # fmt: skip
