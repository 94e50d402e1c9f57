"""Statistics of a request, with the definitions that every report uses.

acceptance_rate   accepted / proposed tokens
block_efficiency  tokens emitted per target call, bonus and recovered tokens included; 1.00 for plain decoding
mean_accepted     accepted tokens per target call, bonus excluded
cached_rate       prompt tokens whose KV was reused from earlier requests / prompt tokens

A draft (`num_drafts`) is a step with at least one proposed token.
Tokens after a stop count nowhere: where accepted tokens are cut, the proposal is counted up to the same position.
Every token of a tree is a proposed one, at the position it was guessed for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_LOW_ACCEPTANCE = 0.1
_ENOUGH = 50  # proposed tokens before an acceptance rate is worth a remark


@dataclass(slots=True)
class Statistics:
    """Counts and seconds of one request.

    `prefill_s` is the target's prompt (reading what is not cached, and copying what is), `verify_s` its other calls;
    `draft_s` is everything the drafter does, a draft model's own prompt included; `rest_s` is everything else between
    prompt and last token (acceptance, sampling, stop rules, text), waiting for the consumer of a stream excluded.
    `first_token_s` is all of these until the first token.
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
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    rest_s: float = 0.0
    first_token_s: float = 0.0

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

    def count(self, *, depths: Sequence[int], accepted: int, committed: int) -> None:
        """Add one step that committed `committed` tokens, the first `accepted` of them guesses.

        depths: of every guess, how many others come before it in the proposal.
        """
        if committed <= accepted:  # a stop cut the block: nothing after it was ever offered
            depths, accepted = [depth for depth in depths if depth < committed], committed
        self.num_steps += 1
        self.num_drafts += bool(depths)
        self.num_tokens += committed
        self.num_proposed += len(depths)
        self.num_accepted += accepted
        missing = max(depths, default=-1) + 1 - len(self.proposed_by_position)
        for counts in (self.proposed_by_position, self.accepted_by_position):
            counts += [0] * missing
        for depth in depths:
            self.proposed_by_position[depth] += 1
        for depth in range(accepted):
            self.accepted_by_position[depth] += 1

    @property
    def hint(self) -> str | None:
        """A remark when speculation did not help, with the likely cause."""
        if self.num_drafter_faults:
            return f"the {self.drafter} drafter failed and was dropped; see the log"
        if self.drafter == "none" or self.num_steps < 2:
            return None
        if not self.num_proposed:
            return f"the {self.drafter} drafter proposed nothing (nothing to look up, or no room left)"
        if self.num_proposed >= _ENOUGH and self.acceptance_rate < _LOW_ACCEPTANCE:
            return f"few proposals were accepted: try a smaller k, or another drafter than {self.drafter}"
        return None

    def summary(self) -> str:
        """Return one line for people."""
        cached = f" ({self.num_cached_tokens} cached)" if self.num_cached_tokens else ""
        parts = [
            f"{self.num_tokens} tokens in {self.decode_s:.2f} s ({self.tokens_per_s:.1f} tokens/s)",
            f"prompt {self.num_prompt_tokens} tokens{cached} in {self.prefill_s:.2f} s",
            f"drafter {self.drafter}",
            f"steps {self.num_steps}, block efficiency {self.block_efficiency:.2f}",
            f"accepted {self.num_accepted} of {self.num_proposed} ({self.acceptance_rate:.0%})",
            f"draft {self.draft_s:.2f} s, verify {self.verify_s:.2f} s, rest {self.rest_s:.2f} s",
        ]
        return " | ".join(parts + ([f"hint: {self.hint}"] if self.hint else []))

    def to_dict(self) -> dict[str, Any]:
        """Return counts, seconds and rates for JSON."""
        names = (
            "drafter", "num_prompt_tokens", "num_cached_tokens", "num_tokens", "num_steps", "num_calls", "num_drafts",
            "num_proposed", "num_accepted", "num_recomputed", "num_drafter_faults", "proposed_by_position",
            "accepted_by_position",
            "prefill_s", "draft_s", "verify_s", "rest_s", "first_token_s", "decode_s", "cached_rate",
            "acceptance_rate", "block_efficiency", "mean_accepted", "tokens_per_s", "hint",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}
