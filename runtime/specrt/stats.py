"""Statistics of a request, with the definitions that every report uses.

acceptance_rate   accepted / proposed tokens
block_efficiency  tokens emitted per target call, bonus and recovered tokens included; 1.00 for plain decoding
mean_accepted     accepted tokens per target call, bonus excluded
cached_rate       prompt tokens whose KV was reused from earlier requests / prompt tokens

A draft (`num_drafts`) is a step with at least one proposed token. A combined drafter has the counts of each of its
parts in `parts`; they add up to its own.
Tokens after a stop count nowhere: where accepted tokens are cut, the proposal is counted up to the same position.
Every token of a tree is a proposed one, at the position it was guessed for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from specrt.cost_model import break_even_rate, call_seconds

_LOW_ACCEPTANCE = 0.1
_ENOUGH = 50  # proposed tokens before an acceptance rate is worth a remark
_SLOWER = 0.97  # estimated speedup below which a run is called slower: calls were timed at another moment

_SUMMED = (
    "num_prompt_tokens", "num_cached_tokens", "num_tokens", "num_steps", "num_drafts", "num_proposed",
    "num_accepted", "num_recomputed", "num_drafter_faults", "prefill_s", "draft_s", "verify_s", "rest_s",
    "first_token_s",
)  # fmt: skip


@dataclass(slots=True)
class PartCounts:
    """Drafts, proposed and accepted tokens of one part of a combined drafter, counted as the request's."""

    num_drafts: int = 0
    num_proposed: int = 0
    num_accepted: int = 0


def describe_parts(parts: Mapping[str, PartCounts]) -> str:
    """Return the accepted and proposed tokens and the drafts of each part, in words."""
    return ", ".join(
        f"{name} {part.num_accepted} of {part.num_proposed} in {part.num_drafts} drafts" for name, part in parts.items()
    )


@dataclass(slots=True)
class Statistics:
    """Counts and seconds of one request.

    `prefill_s` is the target's prompt (reading what is not cached, and copying what is), `verify_s` its other calls;
    `draft_s` is everything the drafter does, a draft model's own prompt included; `rest_s` is everything else between
    prompt and last token (acceptance, sampling, stop rules, text), waiting for the consumer of a stream excluded.
    `first_token_s` is all of these until the first token. `calls_by_rows` counts the steps by the rows of their call;
    `call_s` are seconds of a call by width as measured on this machine, empty where unknown.
    """

    drafter: str
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_recomputed: int = 0
    num_drafter_faults: int = 0
    proposed_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    calls_by_rows: dict[int, int] = field(default_factory=dict)
    call_s: Mapping[int, float] = field(default_factory=dict)
    parts: dict[str, PartCounts] = field(default_factory=dict)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    rest_s: float = 0.0
    first_token_s: float = 0.0

    @classmethod
    def combined(cls, runs: Sequence["Statistics"]) -> "Statistics":
        """Return the counts and seconds of several requests with one drafter as those of one."""
        total = cls(drafter=runs[0].drafter, num_prompt_tokens=0, call_s=runs[0].call_s)
        for run in runs:
            for name in _SUMMED:
                setattr(total, name, getattr(total, name) + getattr(run, name))
            for rows, count in run.calls_by_rows.items():
                total.calls_by_rows[rows] = total.calls_by_rows.get(rows, 0) + count
            for part, counts in run.parts.items():
                total._count_part(part, counts.num_drafts, counts.num_proposed, counts.num_accepted)
        for name in ("proposed_by_position", "accepted_by_position"):
            columns = zip_longest(*(getattr(run, name) for run in runs), fillvalue=0)
            setattr(total, name, [sum(column) for column in columns])
        return total

    @property
    def acceptance_rate(self) -> float:
        """Accepted per proposed token; 0 if none was proposed."""
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0

    @property
    def block_efficiency(self) -> float:
        """Tokens per target call; 0 if there was no call."""
        return self.num_tokens / self.num_calls if self.num_steps else 0.0

    @property
    def mean_accepted(self) -> float:
        """Accepted tokens per target call; 0 if there was no call."""
        return self.num_accepted / self.num_calls if self.num_steps else 0.0

    @property
    def num_calls(self) -> int:
        """Target calls after prefill: one per step, and those that strict requests verified once more."""
        return self.num_steps + self.num_recomputed

    @property
    def cached_rate(self) -> float:
        """Prompt tokens taken from earlier requests per prompt token; 0 without a prompt."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def decode_s(self) -> float:
        """Seconds after the target's prefill."""
        return self.draft_s + self.verify_s + self.rest_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the target's prefill; 0 if none was emitted."""
        return self.num_tokens / self.decode_s if self.decode_s else 0.0

    def count(self, *, depths: Sequence[int], accepted: int, committed: int, part: str | None = None) -> None:
        """Add one step that committed `committed` tokens, the first `accepted` of them guesses.

        depths: of every guess, how many others come before it in the proposal. part: of a combined drafter, that made
        the guesses.
        """
        rows = len(depths) + 1
        self.calls_by_rows[rows] = self.calls_by_rows.get(rows, 0) + 1
        if committed <= accepted:  # a stop cut the block: nothing after it was ever offered
            depths, accepted = [depth for depth in depths if depth < committed], committed
        self.num_steps += 1
        self.num_drafts += bool(depths)
        self.num_tokens += committed
        self.num_proposed += len(depths)
        self.num_accepted += accepted
        if part is not None and depths:
            self._count_part(part, 1, len(depths), accepted)
        missing = max(depths, default=-1) + 1 - len(self.proposed_by_position)
        for counts in (self.proposed_by_position, self.accepted_by_position):
            counts += [0] * missing
        for depth in depths:
            self.proposed_by_position[depth] += 1
        for depth in range(accepted):
            self.accepted_by_position[depth] += 1

    def _count_part(self, part: str, num_drafts: int, num_proposed: int, num_accepted: int) -> None:
        counts = self.parts.setdefault(part, PartCounts())
        counts.num_drafts += num_drafts
        counts.num_proposed += num_proposed
        counts.num_accepted += num_accepted

    @property
    def _plain_call_s(self) -> float | None:
        """Seconds that a plain step's call would have taken in this run; None where `call_s` is unknown.

        The proportion of widths is that of `call_s`, the level that of this run, whose context and load were others.
        """
        if not self.call_s or not self.num_steps:
            return None
        timed = sum(count * call_seconds(self.call_s, rows) for rows, count in self.calls_by_rows.items())
        timed += self.num_recomputed * call_seconds(self.call_s, 2)
        return call_seconds(self.call_s, 1) * self.verify_s / timed

    @property
    def _break_even_efficiency(self) -> float | None:
        """Tokens per step at which this run would have been as fast as plain decoding; None where that is unknown."""
        call_s = self._plain_call_s
        if not call_s:
            return None
        return self.decode_s / (self.num_steps * call_s + self.rest_s)

    @property
    def estimated_speedup(self) -> float | None:
        """Speedup over plain decoding at the same width, by what calls cost; None where that is unknown."""
        needed = self._break_even_efficiency
        return self.num_tokens / self.num_steps / needed if needed else None

    @property
    def hint(self) -> str | None:
        """A remark when speculation did not help, with the likely cause."""
        if self.num_drafter_faults:
            what = f"a part of the {self.drafter} drafter" if self.parts else f"the {self.drafter} drafter"
            return f"{what} failed and was dropped; see the log"
        if self.drafter == "none" or self.num_steps < 2:
            return None
        if not self.num_proposed:
            return f"the {self.drafter} drafter proposed nothing (nothing to look up, or no room left)"
        if self.num_proposed >= _ENOUGH and self.estimated_speedup is not None:
            return self._why_slow() if self.estimated_speedup < _SLOWER else None
        if self.num_proposed >= _ENOUGH and self.acceptance_rate < _LOW_ACCEPTANCE:
            return f"few proposals were accepted: try a smaller k, or another drafter than {self.drafter}"
        return None

    def _why_slow(self) -> str:
        """Name what makes the difference: drafting, the rows of the calls, or else acceptance."""
        call_s, needed = self._plain_call_s or 0.0, self._break_even_efficiency or 0.0
        plain_s = self.num_tokens * call_s + self.rest_s * self.num_tokens / self.num_steps
        if self.decode_s - self.draft_s < plain_s:
            calls = self.draft_s / (self.num_steps * call_s)
            cause = f"the {self.drafter} drafter takes {calls:.2f} plain calls per step: try a smaller k, or another"
        elif self.decode_s - (self.verify_s - self.num_steps * call_s) < plain_s:
            cause = f"a call takes {self.verify_s / (self.num_steps * call_s):.2f} plain ones: try a smaller k"
        else:
            cause = f"few proposals were accepted: try a smaller k, or another drafter than {self.drafter}"
        rate = break_even_rate(needed, self.num_proposed / self.num_steps)
        enough = f"{rate:.0%} would break even" if rate <= 1 else "even all of them would not break even"
        return f"slower than plain decoding: {cause} (accepted {self.acceptance_rate:.0%}, {enough})"

    def summary(self) -> str:
        """Return one line for people."""
        cached = f" ({self.num_cached_tokens} cached)" if self.num_cached_tokens else ""
        parts = [
            f"{self.num_tokens} tokens in {self.decode_s:.2f} s ({self.tokens_per_s:.1f} tokens/s)",
            f"prompt {self.num_prompt_tokens} tokens{cached} in {self.prefill_s:.2f} s",
            f"drafter {self.drafter}",
            f"steps {self.num_steps}, block efficiency {self.block_efficiency:.2f}",
            f"accepted {self.num_accepted} of {self.num_proposed} ({self.acceptance_rate:.0%})"
            f"{f': {describe_parts(self.parts)}' if self.parts else ''}",
            f"draft {self.draft_s:.2f} s, verify {self.verify_s:.2f} s, rest {self.rest_s:.2f} s",
        ]
        return " | ".join(parts + ([f"hint: {self.hint}"] if self.hint else []))

    def to_dict(self) -> dict[str, Any]:
        """Return counts, seconds and rates for JSON."""
        names = (
            "drafter", "num_prompt_tokens", "num_cached_tokens", "num_tokens", "num_steps", "num_calls", "num_drafts",
            "num_proposed", "num_accepted", "num_recomputed", "num_drafter_faults", "proposed_by_position",
            "accepted_by_position", "calls_by_rows", "call_s",
            "prefill_s", "draft_s", "verify_s", "rest_s", "first_token_s", "decode_s", "cached_rate",
            "acceptance_rate", "block_efficiency", "mean_accepted", "tokens_per_s", "estimated_speedup",
            "hint",
        )  # fmt: skip
        parts = {name: asdict(part) for name, part in self.parts.items()}
        return {name: getattr(self, name) for name in names} | {"parts": parts}
