"""The loop: draft, verify, accept, commit.

With n committed tokens, the last of which is not yet in the target's KV buffers:

              before      call                                   after call    then
  target KV   n - 1       verify [t_last, x_1 .. x_k]            n + k         keep 1 + a rows: n + a = n' - 1
  tokens      n           accept -> a in 0 .. k, next token                    n' = n + a + 1

The rows to keep are that of t_last and those of the accepted tokens: the first ones of a chain, those on the accepted
path of a tree. Other branches of a tree stand between these, which costs the rows their last bits; a strict request has
such a path verified once more, as a chain. Plain decoding is the drafter that proposes nothing.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

from specrt.acceptance import Proposal, Verdict, accept
from specrt.control import Controller, RecordingController, Step
from specrt.drafters import Drafter
from specrt.drafters.guard import GuardedDrafter
from specrt.engine import Engine
from specrt.prefix_cache import Reuse
from specrt.rows import Row, Rows
from specrt.sampling import Sampler, log_probabilities
from specrt.stats import Statistics
from specrt.stops import FinishReason, StopRules


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token under the model's own law, and the most probable tokens with theirs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One committed token: its id, the text it released (may be empty), its log-probability if asked for."""

    id: int
    text: str
    logprob: TokenLogprob | None = None


class Loop:
    """One request on a target engine: iterate `run` for its tokens, in order, one at a time.

    reuse: a prefix cache for the target, None to begin with empty KV buffers.
    """

    def __init__(
        self, target: Engine, drafter: Drafter, sampler: Sampler, stops: StopRules, prompt: list[int], *,
        controller: Controller, clock: Callable[[], float], draft_budget_s: float | None = None, strict: bool = False,
        reuse: Reuse | None = None,
    ) -> None:  # fmt: skip
        self.tokens = list(prompt)
        self.stats = Statistics(drafter=drafter.name, num_prompt_tokens=len(prompt))
        self.finish_reason: FinishReason | None = stops.exhausted()
        self._target, self._sampler, self._stops = target, sampler, stops
        self._controller, self._clock, self._strict, self._reuse = controller, clock, strict, reuse
        self._drafter = GuardedDrafter.guarding(
            drafter, self.stats, vocab_size=target.vocab_size, takes_trees=target.takes_trees, budget_s=draft_budget_s,
            clock=clock,
        )  # fmt: skip

    def run(self) -> Generator[Token, None, None]:
        """Generate until a stop rule ends it; `finish_reason` and `stats` are final then."""
        if self.finish_reason is None:
            self._prefill()
        while self.finish_reason is None:
            yield from self._step()

    def record(self, steps: list[Step]) -> None:
        """Keep what each step does in `steps`."""
        self._controller = RecordingController(self._controller, steps)

    def cancel(self) -> None:
        """End after the step in progress."""
        self.finish_reason = self.finish_reason or "cancelled"

    def _prefill(self) -> None:
        started = self._clock()
        if self._reuse is None:
            self._target.rollback(0)
        else:
            self.stats.num_cached_tokens = self._reuse(self.tokens[:-1], cold_bits=True)
        self._target.prefill(self.tokens[self.stats.num_cached_tokens : -1])
        prefilled = self._clock()
        self._drafter.start(self.tokens, self._sampler)
        self.stats.prefill_s = prefilled - started
        self.stats.draft_s = self._clock() - prefilled  # plain decoding has no such cost

    def _step(self) -> list[Token]:
        n = len(self.tokens)
        assert self._target.kv_length == n - 1
        started = self._clock()
        room = min(self._target.verify_widths[-1], self._stops.remaining()) - 1
        drafts = self._drafter.propose(self.tokens, self._controller.limit(room) if room > 0 else 0)
        drafted = self._clock()
        proposal = drafts.first(self._controller.keep(drafts))
        logits = self._target.verify((self.tokens[-1], *proposal.token_ids), proposal.row_parents)
        verified = self._clock()
        verdict = accept(proposal, logits, self._sampler, start=n)
        self._controller.learn(
            Step(
                proposal=proposal, num_drafted=len(drafts.token_ids), num_accepted=verdict.num_accepted,
                draft_s=drafted - started, verify_s=verified - drafted,
            )
        )  # fmt: skip
        judged = proposal
        if self._strict and not verdict.is_first_branch:
            judged, logits, verdict = self._judge_again(proposal, verdict)
        block = (*(judged.token_ids[node] for node in verdict.path), verdict.next_token)
        rows = (0, *(node + 1 for node in verdict.path))
        committed = self._commit(block, logits, rows)
        self._target.keep(rows[: len(committed)])
        self._sampler.forget(len(self.tokens))
        stats = self.stats
        stats.count(depths=proposal.depths, accepted=verdict.num_accepted, committed=len(committed), part=proposal.part)
        stats.draft_s += drafted - started
        stats.verify_s += verified - drafted
        stats.rest_s += self._clock() - verified
        if stats.num_steps == 1:
            stats.first_token_s = stats.prefill_s + stats.decode_s
        return committed

    def _judge_again(self, proposal: Proposal, verdict: Verdict) -> tuple[Proposal, Rows, Verdict]:
        """Verify an accepted path as the chain it is, in the arithmetic of plain decoding, which has the last word."""
        n, started = len(self.tokens), self._clock()
        chain = Proposal(tuple(proposal.token_ids[node] for node in verdict.path))
        self._target.rollback(n - 1)
        logits = self._target.verify((self.tokens[-1], *chain.token_ids))
        seconds = self._clock() - started
        self.stats.num_recomputed += 1
        self.stats.verify_s += seconds
        self.stats.rest_s -= seconds
        self._sampler.rewind(n)
        return chain, logits, accept(chain, logits, self._sampler, start=n)

    def _commit(self, block: tuple[int, ...], logits: Rows, rows: tuple[int, ...]) -> list[Token]:
        """Pass a block's tokens, picked from `rows`, through the stop rules; the one that ends the text is the last."""
        committed = []
        for row, token in zip(rows, block, strict=True):
            text, reason = self._stops.push(token)
            self.tokens.append(token)
            committed.append(Token(token, text, self._logprob(logits[row], token)))
            if reason is not None:
                self.finish_reason = reason
                break
        return committed

    def _logprob(self, row: Row, token: int) -> TokenLogprob | None:
        count = self._sampler.params.logprobs
        if count is None:
            return None
        logprobs = log_probabilities(row)
        best = np.argsort(-logprobs, kind="stable")[:count]
        return TokenLogprob(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))
