"""`specrt.load`: an artifact, ready to generate."""

import contextlib
import copy
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, Unpack

from specrt.control import AdaptiveController, CallCosts, Controller, FixedController
from specrt.drafters import Drafter, NoDrafter
from specrt.drafters.model import ModelDrafter
from specrt.drafters.ngram import NgramDrafter
from specrt.engine import Engine, open_engine
from specrt.engine_ort import engine_version
from specrt.errors import BusyError, EngineError, ManifestError, RequestError
from specrt.loop import Loop, Token, TokenLogprob
from specrt.machine import MachineFile, default_cache_dir, measure_facts
from specrt.requests import (
    Options,
    Prompt,
    Speculation,
    check_options,
    prompt_ids,
    resolve_sampling,
    resolve_speculation,
)
from specrt.sampling import Sampler, SamplingParams
from specrt.stats import Statistics
from specrt.stops import FinishReason, StopRules
from specrt.text import Tokenizer
from specrt_profiles.generation import read_generation
from specrt_profiles.manifest import CHAT_TEMPLATE_FILE, GENERATION_FILE, read_manifest


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


def load(path: str | Path, *, threads: int | None = None, cache_dir: str | Path | None = None) -> "LanguageModel":
    """Open an artifact.

    threads: CPU threads of each engine, None for one per physical core. cache_dir: where measurements about
    this machine are kept (~/.cache/specrt/machine). The first load on a machine replays the reference logits and
    finds out which call widths give the same bits, which takes some 150 engine calls. Raises `ManifestError`,
    `TextError` or `EngineError` for a damaged artifact, or one whose logits are wrong on this machine;
    `MissingExtraError` without an engine.
    """
    return LanguageModel(Path(path), threads=threads, cache_dir=Path(cache_dir or default_cache_dir()))


class LanguageModel:
    """A loaded artifact. Serves one request at a time; a second one meanwhile is refused with `BusyError`.

    It may be used from any thread, but belongs to the process that loaded it: engines do not survive a fork, and ONNX
    Runtime makes a forked child wait for ever at its exit unless it leaves by `os._exit`, as multiprocessing does.
    Call `close` to release the memory, or use it as a context manager, which also ends a request in progress.
    """

    def __init__(
        self, folder: Path, *, threads: int | None, cache_dir: Path, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.defaults = read_generation(folder)
        has_template = CHAT_TEMPLATE_FILE in self.manifest.files
        self.tokenizer = Tokenizer(folder, self.manifest.vocabulary, has_template=has_template)
        self._check_defaults()
        self._threads, self._clock = threads, clock
        self._engines: dict[str, Engine] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self._stream: Callable[[], Stream | None] = lambda: None
        self.target = self._engine("target")
        self.machine = MachineFile(folder, engine=engine_version(), threads=threads, cache_dir=cache_dir)
        facts = self.machine.facts(lambda: measure_facts(self.target, self.manifest.target, folder, clock=clock))
        if not facts.exact_widths:
            raise EngineError(
                f"{folder}: on this machine rows of a call influence each other at every width: not lossless"
            )
        self.target.verify_widths = facts.exact_widths
        self.choice = facts.choice
        self._costs = CallCosts(facts.call_s)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """Generate until a stop rule ends it. prompt: a text, token ids, or chat messages; options: see `Options`."""
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
            return stream.result

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> "Stream":
        """Start generating and return an iterator of `Token`, one per token in order; closing it ends the request."""
        return self.start(prompt, options)

    def start(
        self, prompt: Prompt, options: Options, *, target: Engine | None = None,
        clock: Callable[[], float] | None = None,
    ) -> "Stream":  # fmt: skip
        """Do what `stream` does with options in a dict; `target`, `clock`: others than the model's, to measure."""
        given = check_options(options)
        self._claim()
        try:
            stream = Stream(
                self._request(prompt, given, target or self.target, clock or self._clock), self._lock.release
            )
        except BaseException:
            self._lock.release()
            raise
        self._stream = weakref.ref(stream)
        return stream

    def close(self) -> None:
        """Release the engines. A request in progress must be closed first. Safe to call again."""
        if self._closed:
            return
        self._claim()
        self._closed = True
        for engine in self._engines.values():
            engine.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._process:
            return
        stream = self._stream()
        if stream is not None:
            stream.close()
        self.close()

    @property
    def max_k(self) -> int:
        """The largest k that can be asked for here."""
        return self.target.verify_widths[-1] - 1

    def _request(self, prompt: Prompt, given: dict[str, Any], target: Engine, clock: Callable[[], float]) -> "_Request":
        vocab_size, manifest = self.target.vocab_size, self.manifest
        ids = prompt_ids(
            prompt, self.tokenizer, vocab_size=vocab_size, capacity=self.target.capacity,
            template_kwargs=given.get("chat_template_kwargs"),
        )  # fmt: skip
        params = resolve_sampling(given, self.defaults, self.tokenizer, vocab_size=vocab_size)
        how = resolve_speculation(
            given, drafters={name: manifest.default_k(name) for name in manifest.drafters},
            default=manifest.default_drafter, choice=self.choice, max_k=self.max_k,
        )  # fmt: skip
        eos = () if params.ignore_eos else manifest.vocabulary.eos_token_ids
        end_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        stops = StopRules(
            params, end_ids=end_ids, room=self.target.capacity - len(ids), detokenizer=self.tokenizer.detokenizer(ids)
        )
        sampler = Sampler(params, ids, vocab_size=vocab_size, end_ids=end_ids)
        controller = self._controller(how, params, given)
        loop = Loop(
            target, self._drafter(how), sampler, stops, ids, controller=controller, clock=clock,
            draft_budget_s=how.draft_budget_s,
        )  # fmt: skip
        return _Request(loop, stops, params)

    def _check_defaults(self) -> None:
        try:
            resolve_sampling({}, self.defaults, self.tokenizer, vocab_size=self.manifest.target.vocab_size)
        except RequestError as error:
            raise ManifestError(f"{self.folder / GENERATION_FILE}: {error}") from None

    def _drafter(self, how: Speculation) -> Drafter:
        if how.k == 0 or how.drafter == "none":
            return NoDrafter()
        if self.manifest.drafters[how.drafter].kind == "ngram":
            return NgramDrafter(max_ngram=how.prompt_lookup_max, min_ngram=how.prompt_lookup_min)
        engine = self._engine(str(self.manifest.drafters[how.drafter].engine))
        return ModelDrafter(engine, vocab_size=self.target.vocab_size)

    def _controller(self, how: Speculation, params: SamplingParams, given: dict[str, Any]) -> Controller:
        """Return what decides k; a text that depends on k is repeatable only where k is fixed."""
        sampled = params.coupling == "rejection" and params.temperature > 0 and how.drafter == "model"
        if sampled and "seed" in given:
            if given.get("k") == "auto" or how.max_step_ms is not None:
                raise RequestError(
                    "k: with coupling 'rejection' a seed's text depends on k: give it, or leave out seed"
                )
            if how.draft_budget_s is not None:
                raise RequestError(
                    "draft_budget_ms: with coupling 'rejection' a seed's text depends on it: leave out one of them"
                )
            return FixedController(how.k)
        if not how.adaptive:
            return FixedController(how.k)
        return AdaptiveController(self._costs, first=how.k, max_step_s=(how.max_step_ms or math.inf) / 1e3)

    def _engine(self, name: str) -> Engine:
        """Return an engine, opening it at its first use."""
        if name not in self._engines:
            self._engines[name] = open_engine(self.folder, self.manifest.engines[name], threads=self._threads)
        return self._engines[name]

    def _claim(self) -> None:
        _check_process(self._process)
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "another request is in progress: finish or close its stream first, or load the artifact once more"
            )
        if self._closed:
            self._lock.release()
            raise EngineError("the artifact is closed: load it again")


def _check_process(process: int) -> None:
    if os.getpid() != process:
        raise BusyError(f"loaded in process {process}, used in {os.getpid()}: load the artifact after the fork")


@dataclass(frozen=True, slots=True)
class _Request:
    """A prepared request: its loop, and what the result will be made of."""

    loop: Loop
    stops: StopRules
    params: SamplingParams


class Stream(Iterator[Token]):
    """The tokens of a request as they are committed. `result` is what has been generated so far, final at the end.

    Closing it, leaving its `with` block, or dropping it ends the request and frees the model for the next.
    `cancel` may be called from another thread: the step in progress is the last.
    """

    def __init__(self, request: _Request, release: Callable[[], None]) -> None:
        self._request = request
        self._tokens = request.loop.run()
        self._release = [release]  # taken out by whoever closes first
        self._process = os.getpid()
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def __next__(self) -> Token:
        _check_process(self._process)
        try:
            token = next(self._tokens)
        except BaseException:  # StopIteration, an error or an interrupt: this request is over
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
        with contextlib.suppress(IndexError):  # another thread closed it meanwhile
            self._release.pop()()

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
