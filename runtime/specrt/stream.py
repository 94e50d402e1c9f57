"""A request in progress: its tokens as they are committed, and what has come of it."""

import copy
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from specrt.errors import BusyError
from specrt.loop import Loop, Token, TokenLogprob
from specrt.sampling import SamplingParams
from specrt.stats import Statistics
from specrt.stops import FinishReason, StopRules

_log = logging.getLogger(__name__)
Outcome = FinishReason | Literal["error"]


class Observer(Protocol):
    """Is told of every request once, when it has ended: `specrt.metrics.Metrics`, or anything of your own."""

    def observe(self, stats: Statistics, outcome: Outcome) -> None:
        """Take the statistics of a request; outcome: its finish reason, or `error` if it failed.

        Called while the model still belongs to the request. What it raises is logged and goes no further.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished generation.

    `token_ids` are the generated ones, an end token included; `text` leaves special tokens and the stop string
    out. finish_reason: `stop` (an end token, stop id or stop string, named in `stop`), `length` (max_tokens),
    `capacity` or `cancelled`. `logprobs` has an entry per token if they were asked for. `params` are the
    parameters that were in effect, the seed among them. `stats` count what was computed, also where a stream was
    closed before all of it was taken. A cancelled result's text may lack its last characters: those that could
    still have become a stop string or another character.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: int | str | None
    logprobs: tuple[TokenLogprob, ...] | None
    params: SamplingParams
    stats: Statistics


@dataclass(frozen=True, slots=True)
class Request:
    """A prepared request: its loop, what the result will be made of, whether later ones may draft from its output."""

    loop: Loop
    stops: StopRules
    params: SamplingParams
    suffix_cache: bool


class Stream(Iterator[Token]):
    """The tokens of a request as they are committed. `result` is what has been generated so far, final at the end.

    Closing it, leaving its `with` block, or dropping it ends the request and frees the model for the next.
    `cancel` may be called from another thread: the step in progress is the last.
    """

    def __init__(self, request: Request, release: Callable[[], None], observer: Observer | None) -> None:
        self._request, self._observer, self._failed = request, observer, False
        self._tokens = request.loop.run()
        self._release = [release]  # taken out by whoever closes first
        self._process = os.getpid()
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def __next__(self) -> Token:
        check_process(self._process)
        try:
            token = next(self._tokens)
        except BaseException as error:  # StopIteration, an error or an interrupt: this request is over
            self._failed = isinstance(error, Exception) and not isinstance(error, StopIteration)
            self.close()
            raise
        self._ids.append(token.id)
        self._texts.append(token.text)
        if token.logprob is not None:
            self._logprobs.append(token.logprob)
        return token

    def cancel(self) -> None:
        """End the request after the step in progress, with finish reason `cancelled`."""
        self._request.loop.cancel()

    def close(self) -> None:
        """End the request now. Safe to call again, but not while another thread takes a token: see `cancel`."""
        if not self._release:
            return
        try:
            self._tokens.close()
        except ValueError:
            raise BusyError("another thread is taking a token of this stream: cancel it instead") from None
        self.cancel()
        try:
            release = self._release.pop()
        except IndexError:  # another thread closed it meanwhile
            return
        try:
            self._report()
        finally:
            release()

    @property
    def result(self) -> Result:
        """What was generated so far; `finish_reason` is `cancelled` if the request was not run to its end."""
        request = self._request
        loop, ids = request.loop, tuple(self._ids)
        reason = loop.finish_reason if len(ids) == loop.stats.num_tokens else None
        return Result(
            text="".join(self._texts),
            token_ids=ids,
            finish_reason=reason or "cancelled",
            stop=request.stops.cause if reason else None,
            logprobs=None if request.params.logprobs is None else tuple(self._logprobs),
            params=request.params,
            stats=copy.deepcopy(loop.stats),
        )

    def _report(self) -> None:
        if self._observer is None:
            return
        result = self.result
        try:
            self._observer.observe(result.stats, "error" if self._failed else result.finish_reason)
        except Exception:
            _log.exception("the observer of requests failed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def check_process(process: int) -> None:
    """Raise `BusyError` in another process than the one that loaded the artifact."""
    if os.getpid() != process:
        raise BusyError(f"loaded in process {process}, used in {os.getpid()}: load the artifact after the fork")
