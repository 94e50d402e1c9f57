"""`specrt.load`: an artifact, ready to generate."""

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

from specrt.control import AdaptiveController, CallCosts, Controller, FixedController, Step
from specrt.drafters import Drafter, NoDrafter
from specrt.drafters.combined import CombinedController, CombinedDrafter, OwnController, SureController
from specrt.drafters.early_exit import EarlyExitDrafter
from specrt.drafters.model import ModelDrafter
from specrt.drafters.ngram import NgramDrafter
from specrt.drafters.suffix import SuffixCache, SuffixDrafter
from specrt.engine import Engine, KvEngine, open_engine, resolve_device
from specrt.errors import BusyError, EngineError, ManifestError, RequestError
from specrt.heads import Heads
from specrt.loop import Loop
from specrt.machine import MachineFacts, MachineFile, default_cache_dir, measure_facts
from specrt.prefix_cache import PrefixCache, prefix_cache
from specrt.requests import Options, Prompt, check_options, prompt_ids, resolve_sampling
from specrt.sampling import Sampler, SamplingParams
from specrt.speculation import Speculation, check_repeatable, default_drafter, resolve_speculation
from specrt.stops import StopRules
from specrt.stream import Observer, Request, Result, Stream, check_process
from specrt.text import Tokenizer
from specrt_profiles.drafter import DRAWING, EARLY_EXIT, HEADS
from specrt_profiles.generation import read_generation
from specrt_profiles.manifest import CHAT_TEMPLATE_FILE, GENERATION_FILE, read_manifest


def load(
    path: str | Path, *, device: str | None = None, threads: int | None = None, cache_dir: str | Path | None = None,
    prefix_cache_mib: float | None = 0, metrics: Observer | None = None,
) -> "LanguageModel":  # fmt: skip
    """Open an artifact.

    device: `cpu`, or `cuda:N` for GPU number N; None is the CPU, but `cuda:0` for a TensorRT plan, which runs nowhere
    else. threads: CPU threads of each engine, None for one per physical core; without effect on a GPU. cache_dir: where
    measurements about this machine are kept (~/.cache/specrt/machine). prefix_cache_mib: host memory for the KV of
    earlier requests, which later prompts that begin alike take over; 0 for what is still in the engines' own buffers
    (on a GPU there is no more), None for nothing at all (see docs/prefix-cache.md). metrics: what is told of every
    request when it has ended, such as `specrt.metrics.Metrics`. The first load on a machine replays the reference
    logits and finds out which call widths give the same bits, which takes some 150 engine calls.

    On a GPU each engine has one stream of its own and waits for it in every call; the GPU is current in the calling
    thread only meanwhile, so any thread may call, and other users of CUDA in the process are not disturbed.

    Raises `ManifestError`, `TextError` or `EngineError` for a damaged artifact, one whose logits are wrong on this
    machine, or a device that cannot run it; `MissingExtraError` without an engine.
    """
    return LanguageModel(
        Path(path), device=device, threads=threads, cache_dir=Path(cache_dir or default_cache_dir()),
        prefix_cache_mib=prefix_cache_mib, metrics=metrics,
    )  # fmt: skip


class LanguageModel:
    """A loaded artifact. Serves one request at a time; a second one meanwhile is refused with `BusyError`.

    It may be used from any thread, but belongs to the process that loaded it: engines do not survive a fork, and ONNX
    Runtime makes a forked child wait for ever at its exit unless it leaves by `os._exit`, as multiprocessing does.
    Call `close` to release the memory, or use it as a context manager, which also ends a request in progress.
    `call_s`: seconds of a verify call by width, as measured when the artifact was first loaded on this machine.
    `suffix_cache` holds the outputs of requests with that option; clear it or set its limit between requests.
    """

    def __init__(
        self, folder: Path, *, device: str | None, threads: int | None, cache_dir: Path,
        prefix_cache_mib: float | None = 0, metrics: Observer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.defaults = read_generation(folder)
        has_template = CHAT_TEMPLATE_FILE in self.manifest.files
        self.tokenizer = Tokenizer(folder, self.manifest.vocabulary, has_template=has_template)
        self._check_defaults()
        self.device = resolve_device(self.manifest.target, device)
        self._prefixes = prefix_cache(prefix_cache_mib, self.device)
        self._device, self._threads, self._clock, self._metrics = device, threads, clock, metrics
        self._engines: dict[str, KvEngine] = {}
        self._heads = Heads(folder, self.manifest, threads=threads, device=device)
        self.suffix_cache = SuffixCache()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self._stream: Callable[[], Stream | None] = lambda: None
        self.target = self._engine("target")
        self.machine = MachineFile(folder, engine=self.target.platform, threads=threads, cache_dir=cache_dir)
        try:
            facts = self._facts()
        except BaseException:
            self.target.close()
            raise
        self.target.verify_widths = facts.exact_widths
        if facts.exact_prefill:
            self.target.contents.exact_widths = (*facts.exact_widths, self.manifest.target.prefill_width)
        self.choice = facts.choice
        self.call_s = facts.call_s
        self._costs = CallCosts(facts.call_s)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """Generate until a stop rule ends it. prompt: a text, token ids, or chat messages; options: see `Options`."""
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
            return stream.result

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Start generating and return an iterator of `Token`, one per token in order; closing it ends the request."""
        return self.start(prompt, options)

    def start(
        self, prompt: Prompt, options: Options, *, target: Engine | None = None,
        clock: Callable[[], float] | None = None, cold: bool = False, steps: list[Step] | None = None,
    ) -> Stream:  # fmt: skip
        """Do what `stream` does with options in a dict.

        To measure: target and clock other than the model's; cold: reuse no KV of earlier requests (nor does a request
        with another target); steps: a list that is to take what each step did.
        """
        given = check_options(options)
        self._claim()
        try:
            prefixes = None if cold or target is not None else self._prefixes
            request = self._request(prompt, given, target or self.target, clock or self._clock, prefixes)
            if steps is not None:
                request.loop.record(steps)
            stream = Stream(request, partial(self._release, request), self._metrics)
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
        self._heads.close()
        if self._prefixes is not None:
            self._prefixes.clear()
        self.suffix_cache.clear()
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

    def _request(
        self, prompt: Prompt, given: dict[str, Any], target: Engine, clock: Callable[[], float],
        prefixes: PrefixCache | None,
    ) -> Request:  # fmt: skip
        vocab_size, manifest = self.target.vocab_size, self.manifest
        ids = prompt_ids(
            prompt, self.tokenizer, vocab_size=vocab_size, capacity=self.target.capacity,
            template_kwargs=given.get("chat_template_kwargs"),
        )  # fmt: skip
        params = resolve_sampling(given, self.defaults, self.tokenizer, vocab_size=vocab_size)
        default = default_drafter(manifest, has_features=self.target.features is not None)
        named = str(given.get("drafter") or (self.choice and self.choice.drafter) or default)
        names = (*manifest.drafter_names, *([named] if manifest.parts(named) else []))
        how = resolve_speculation(
            given, drafters={name: manifest.default_k(name) for name in names}, default=default, choice=self.choice,
            max_k=self.max_k, trees=manifest.of_trees(names) if self.target.takes_trees else None,
        )  # fmt: skip
        eos = () if params.ignore_eos else manifest.vocabulary.eos_token_ids
        end_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        stops = StopRules(
            params, end_ids=end_ids, room=self.target.capacity - len(ids), detokenizer=self.tokenizer.detokenizer(ids)
        )
        sampler = Sampler(params, ids, vocab_size=vocab_size, end_ids=end_ids)
        if target is not self.target and manifest.reads_target(how.drafter):
            raise RequestError(f"drafter: {how.drafter} reads what the target computes and cannot be replayed")
        drafter, controller = self._speculation(how, params, given, prefixes)
        loop = Loop(
            target, drafter, sampler, stops, ids, controller=controller, clock=clock,
            draft_budget_s=how.draft_budget_s, strict=how.strict,
            reuse=None if prefixes is None else partial(prefixes.reuse, self.target),
        )  # fmt: skip
        loop.stats.call_s = self.call_s
        return Request(loop, stops, params, suffix_cache=how.suffix_cache)

    def _check_defaults(self) -> None:
        try:
            resolve_sampling({}, self.defaults, self.tokenizer, vocab_size=self.manifest.target.vocab_size)
        except RequestError as error:
            raise ManifestError(f"{self.folder / GENERATION_FILE}: {error}") from None

    def _speculation(
        self, how: Speculation, params: SamplingParams, given: dict[str, Any], prefixes: PrefixCache | None
    ) -> tuple[Drafter, Controller]:
        """Return the drafter of a request, and what decides its k and, of a combined one, the part."""
        if how.k == 0 or how.drafter == "none":
            return NoDrafter(), FixedController(0)
        parts = self.manifest.parts(how.drafter)
        drafters = [self._drafter(name, how, prefixes) for name in parts or (how.drafter,)]
        repeatable = self._depends_on_k(how.drafter, params) and "seed" in given
        if repeatable:
            check_repeatable(how, given, combined=parts is not None)
        k = how.k if repeatable or not how.adaptive else None
        max_step_s = (how.max_step_ms or math.inf) / 1e3
        own = None if how.controller is None else OwnController(how.controller)
        if parts is None:
            if k is not None:
                return drafters[0], FixedController(k)
            return drafters[0], own or AdaptiveController(self._costs, first=how.k, max_step_s=max_step_s)
        lookup, neural = drafters
        choice = own or (
            SureController(how.k)
            if repeatable
            else CombinedController(self._costs, neural=neural.name, k=k, first=how.k, max_step_s=max_step_s)
        )
        return CombinedDrafter(lookup, neural, choice, name=how.drafter), choice

    def _depends_on_k(self, drafter: str, params: SamplingParams) -> bool:
        """Tell whether guesses are drawn from a law, so that the text of a seed is another for another k."""
        names = self.manifest.parts(drafter) or (drafter,)
        draws = any(self.manifest.all_drafters[name].kind in DRAWING for name in names)
        return params.coupling == "rejection" and params.temperature > 0 and draws

    def _drafter(self, name: str, how: Speculation, prefixes: PrefixCache | None) -> Drafter:
        spec = self.manifest.all_drafters[name]
        if spec.kind == "ngram":
            return NgramDrafter(max_ngram=how.prompt_lookup_max, min_ngram=how.prompt_lookup_min)
        if spec.kind == "suffix":
            cache = self.suffix_cache if how.suffix_cache else None
            return SuffixDrafter(widths=self.target.verify_widths, cache=cache, tree=how.tree)
        if spec.kind == EARLY_EXIT:
            if self.target.exit is None:
                raise EngineError(
                    f"device: expected cpu for the drafter {name}, found {self.device}: choose another drafter there"
                )
            return EarlyExitDrafter(self.target.exit, vocab_size=self.target.vocab_size)
        if spec.kind in HEADS:
            return self._heads.drafter(name, self.target, prefixes, tree=how.tree)
        engine = self._engine(str(spec.engine))
        reuse = None if prefixes is None else partial(prefixes.reuse, engine)
        vocab_size = self.target.vocab_size
        ids = self._heads.token_ids(spec, vocab_size)
        return ModelDrafter(engine, vocab_size=vocab_size, token_ids=ids, reuse=reuse)

    def _facts(self) -> MachineFacts:
        spec = self.manifest.target
        facts = self.machine.facts(lambda: measure_facts(self.target, spec, self.folder, clock=self._clock))
        if not facts.exact_widths:
            raise EngineError(
                f"{self.folder}: on this machine rows of a call influence each other at every width: not lossless"
            )
        return facts

    def _engine(self, name: str) -> KvEngine:
        """Return an engine, opening it at its first use."""
        if name not in self._engines:
            spec = self.manifest.engines[name]
            self._engines[name] = open_engine(self.folder, spec, threads=self._threads, device=self._device)
        return self._engines[name]

    def _release(self, request: Request) -> None:
        """Free the model for the next request."""
        try:
            if request.suffix_cache:
                self.suffix_cache.add(request.loop.tokens[request.loop.stats.num_prompt_tokens :])
        finally:
            self._lock.release()

    def _claim(self) -> None:
        check_process(self._process)
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "another request is in progress: finish or close its stream first, or load the artifact once more"
            )
        if self._closed:
            self._lock.release()
            raise EngineError("the artifact is closed: load it again")
