"""Replay of a known text: what a drafter and a k would have done, without the target's time.

Greedy and `gumbel` texts do not depend on drafter and k: one run of the target tells what every setting has to guess. A
`Transcript` takes the target's place in the very loop that generates: it knows what comes next, and lets its clock
run on by what a call of that width takes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specrt.engine import Engine
from specrt.errors import SpecRTError
from specrt.stats import Statistics
from specrt.tree import depths

if TYPE_CHECKING:
    from specrt.language_model import LanguageModel
    from specrt.requests import Options


def replay(
    model: "LanguageModel", prompt: Sequence[int], token_ids: Sequence[int], options: "Options", *,
    call_s: Mapping[int, float],
) -> Statistics:  # fmt: skip
    """Return the statistics that a request with these options would have on a text that the model wrote.

    Raises `SpecRTError` if the loop says another text.
    """
    transcript = Transcript(model.target, [*prompt, *token_ids], call_s)
    with model.start(prompt, options, target=transcript, clock=transcript.clock) as stream:
        if [token.id for token in stream] != list(token_ids):
            raise SpecRTError("a replay gave other tokens than plain decoding: run 'specrt check'")
        return stream.result.stats


class Transcript:
    """A target that has said its text already; see `Engine` for the contract.

    tokens: prompt and text. call_s: seconds of a verify call by width. `clock` tells real time and that of the calls.
    """

    def __init__(
        self, target: Engine, tokens: Sequence[int], call_s: Mapping[int, float], *,
        real: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.vocab_size, self.capacity, self.verify_widths = target.vocab_size, target.capacity, target.verify_widths
        self.takes_trees, self.platform = target.takes_trees, "transcript"
        self.kv_length = self._call_start = 0
        self._tokens, self._call_s, self._real, self._added_s = list(tokens), call_s, real, 0.0
        self._logits = np.full((self.verify_widths[-1], self.vocab_size), -np.inf, np.float32)
        self._raised = [0] * len(self._logits)

    def clock(self) -> float:
        """Return seconds: what was really spent, and the calls that would have been made."""
        return self._real() + self._added_s

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Take tokens as read."""
        self.kv_length += len(token_ids)

    def verify(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Return logits [n, V] that leave nothing but the text's own next token in each row."""
        started, start = self._real(), self.kv_length
        rows = self._logits[: len(token_ids)]
        for row, depth in enumerate(range(len(rows)) if parents is None else depths(parents)):
            rows[row, self._raised[row]] = -np.inf
            at = start + depth + 1
            self._raised[row] = self._tokens[at] if at < len(self._tokens) else 0
            rows[row, self._raised[row]] = 0.0
        self._call_start, self.kv_length = start, start + len(token_ids)
        width = next(width for width in self.verify_widths if width >= len(token_ids))
        self._added_s += self._call_s[width] - (self._real() - started)
        return rows

    def decode(self, token_id: int) -> NDArray[np.float32]:
        """Feed one token."""
        logits: NDArray[np.float32] = self.verify((token_id,))[0]
        return logits

    def forward(self, token_ids: Sequence[int], start: int, width: int) -> NDArray[np.float32]:
        """Feed tokens at positions start, ..."""
        self.rollback(start)
        return self.verify(token_ids)

    def rollback(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.kv_length = length

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last call."""
        self.rollback(self._call_start + len(rows))

    def close(self) -> None:
        """Hold nothing."""
