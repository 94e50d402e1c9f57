"""When a text ends: decided on committed tokens, one at a time, so that blocks and drafters cannot matter."""

from typing import Literal, Protocol

from specrt.sampling import SamplingParams

FinishReason = Literal["stop", "length", "capacity", "cancelled"]


class Detokenizer(Protocol):
    """Turns tokens into text as they come."""

    def push(self, token_id: int) -> str:
        """Return the text that is now certain; never half a character."""
        ...

    def flush(self) -> str:
        """Return what was held back."""
        ...


class StopRules:
    """Applies end tokens, stop strings, max tokens and capacity to the tokens of one request, and builds its text.

    Text that may turn out to be the beginning of a stop string is held back; a stop string itself is not part of the
    text, while its tokens are part of the ids.
    """

    def __init__(
        self, params: SamplingParams, *, end_ids: tuple[int, ...], room: int, detokenizer: Detokenizer
    ) -> None:
        self._params = params
        self._end_ids = frozenset(end_ids)
        self._room = room
        self._detokenizer = detokenizer
        self._longest = max((len(stop) for stop in params.stop), default=0)
        self._pending = ""  # decoded but not yet emitted
        self._unarmed = 0  # so much of it came before `min_tokens`: no stop string ends there
        self.num_tokens = 0
        self.cause: int | str | None = None

    def exhausted(self) -> FinishReason | None:
        """Return why no further token may be generated, if so."""
        if self._params.max_tokens is not None and self.num_tokens >= self._params.max_tokens:
            return "length"
        return "capacity" if self.num_tokens >= self._room else None

    def remaining(self) -> int:
        """Return how many more tokens may be generated."""
        limits = [self._room] if self._params.max_tokens is None else [self._room, self._params.max_tokens]
        return min(limits) - self.num_tokens

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Take the next token; return the text it releases and why generation ends with it, if it does.

        An end token or stop string wins over a length limit reached by the same token.
        """
        self.num_tokens += 1
        self._pending += self._detokenizer.push(token_id)
        armed = self.num_tokens >= self._params.min_tokens
        ended = armed and token_id in self._end_ids
        reason: FinishReason | None = "stop" if ended else self.exhausted()
        if reason is not None:
            self._pending += self._detokenizer.flush()
        if not armed:
            self._unarmed = len(self._pending)
        elif self._cut_at_stop():
            reason = "stop"
        elif ended:
            self.cause = token_id
        return self._release(everything=reason is not None), reason

    def _cut_at_stop(self) -> bool:
        """Cut the pending text before the earliest stop string in it."""
        begin = {stop: max(0, self._unarmed + 1 - len(stop)) for stop in self._params.stop}
        found = [(at, stop) for stop in begin if (at := self._pending.find(stop, begin[stop])) >= 0]
        if not found:
            return False
        at, self.cause = min(found, key=lambda item: item[0])
        self._pending = self._pending[:at]
        return True

    def _release(self, *, everything: bool) -> str:
        """Take out of the pending text what cannot become part of a stop string."""
        held = 0
        if not everything and self._longest > 1:
            tail = self._pending[-(self._longest - 1) :]
            starts = (i for i in range(len(tail)) if any(stop.startswith(tail[i:]) for stop in self._params.stop))
            held = len(tail) - next(starts, len(tail))
        cut = len(self._pending) - held
        text, self._pending = self._pending[:cut], self._pending[cut:]
        self._unarmed = max(0, self._unarmed - cut)
        return text
