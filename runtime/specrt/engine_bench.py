"""`specrt bench --engine`: what a call of each engine costs, by rows and by context length.

Every round visits all settings in turn, the reading of memory among them, so that a machine that drifts slows all of
them alike. A setting is measured as calls one after the other, as decoding makes them, behind one that is not counted.
Definitions are in `engine_costs`.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from specrt.bandwidth import MemoryReader, num_cores
from specrt.engine import Engine, open_engine
from specrt.engine_costs import CallCost, EngineFacts, EngineReport, break_even
from specrt.errors import RequestError
from specrt.inspect import kv_bytes
from specrt.language_model import LanguageModel
from specrt.machine import processor
from specrt_profiles.drafter import READERS
from specrt_profiles.manifest import EngineSpec

_CONTEXT = 256  # tokens
_CONTEXTS = (0, 256, 1024)  # what a call costs against context length; the longest that fits is added
_ROWS = (1, 8, 32)  # besides the verify widths
_CALLS = 3  # and readings of memory, one after the other, per round and setting

Clock = Callable[[], float]
Shape = tuple[int, int]  # rows, context


@dataclass(slots=True, kw_only=True)
class Subject:
    """An engine under measurement: its description, what is called, and the seconds of each round.

    `tokens` fill its KV buffers up to the capacity; `shapes` are the calls to measure.
    """

    spec: EngineSpec
    name: str
    engine: Engine
    shapes: tuple[Shape, ...]
    tokens: list[int] = field(default_factory=list)
    prefill_tokens: int = 0
    prefill_s: list[float] = field(default_factory=list)
    seconds: dict[Shape, list[float]] = field(default_factory=dict)


def run_engine_bench(
    model: LanguageModel, *, threads: int | None, context: int | None, repeats: int, on_round: Callable[[], None],
    clock: Clock = time.perf_counter,
) -> EngineReport:  # fmt: skip
    """Measure the target of a loaded artifact and its draft engine, if it has one; heads and exits are left out.

    threads: those the artifact was loaded with. context: tokens in the KV buffers where rows are compared, None for 256
    or half the capacity. `on_round` is called after each of `num_rounds` rounds. Raises `RequestError` for a context
    that leaves no room for the widest verify call, or a model on a GPU.
    """
    if model.device != "cpu":
        raise RequestError(
            f"expected an artifact loaded on the CPU, found {model.device}: floors come from this machine's main memory"
        )
    manifest, ladder = model.manifest, model.target.verify_widths
    capacity = min(spec.capacity for spec in manifest.engines.values())
    context = resolve_context(context, widest=ladder[-1], capacity=capacity)
    shapes = plan(ladder, manifest.profile.num_draft_tokens, context=context, capacity=capacity)
    with contextlib.ExitStack() as stack:
        subjects = [_subject(model, "target", model.target, shapes, context)]
        for name in dict.fromkeys(str(spec.engine) for spec in manifest.drafters.values() if spec.kind == "model"):
            engine = open_engine(model.folder, manifest.engines[name], threads=threads)
            stack.callback(engine.close)
            subjects.append(_subject(model, name, engine, shapes, context))
        reader = MemoryReader(threads or num_cores())
        stack.callback(reader.close)
        reading = measure(subjects, reader, repeats=repeats, on_round=on_round, clock=clock)
    gb_per_s = reader.num_bytes / reading / 1e9
    calls = [cost for subject in subjects for cost in call_costs(subject, ladder[0], gb_per_s)]
    seconds = {(cost.engine, cost.rows): cost.seconds for cost in calls if cost.context == context}
    drafters = {name: spec.engine for name, spec in manifest.all_drafters.items() if spec.kind not in READERS}
    return EngineReport(
        machine=processor(), engine_version=model.target.platform, threads=reader.threads, repeats=repeats,
        context=context, verify_widths=ladder, read_bytes=reader.num_bytes, gb_per_s=gb_per_s,
        engines=tuple(_facts(subject) for subject in subjects), calls=tuple(calls),
        break_even=break_even(seconds, ladder, drafters),
    )  # fmt: skip


def num_rounds(repeats: int) -> int:
    """Return how often `run_engine_bench` calls `on_round`."""
    return repeats + 1


def resolve_context(context: int | None, *, widest: int, capacity: int) -> int:
    """Return the context length to compare rows at; raises `RequestError` if the widest call does not fit behind it."""
    if context is None:
        return max(0, min(_CONTEXT, capacity // 2, capacity - widest))
    if not 0 <= context <= capacity - widest:
        raise RequestError(
            f"context: expected 0 to {capacity - widest}, the capacity less the widest verify call, found {context}: "
            "choose a shorter one, or export with a larger --capacity"
        )
    return context


def plan(ladder: Sequence[int], k: int, *, context: int, capacity: int) -> tuple[Shape, ...]:
    """Return the calls to measure: all rows at `context`, and few at other lengths, as far as the capacity allows.

    The few are 1 row, the narrowest width of the ladder, and the one that verifies k tokens.
    """
    rows = [n for n in sorted({*_ROWS, *ladder}) if context + n <= capacity]
    usual = next((width for width in ladder if width > k), ladder[-1])
    few = sorted({1, ladder[0], usual})
    lengths = sorted({*_CONTEXTS, context, capacity - few[-1]})
    others = [(n, at) for at in lengths if at != context and 0 <= at <= capacity - few[-1] for n in few]
    return (*((n, context) for n in rows), *others)


def measure(
    subjects: Sequence[Subject], reader: MemoryReader, *, repeats: int, on_round: Callable[[], None], clock: Clock
) -> float:
    """Fill the subjects' KV buffers and times; return the seconds of the fastest reading of memory.

    The first round is not counted: it binds calls and brings weights into memory.
    """
    for subject in subjects:
        subject.engine.rollback(0)
        subject.engine.prefill(subject.tokens)
    readings = []
    for number in range(num_rounds(repeats)):
        for rounds, sample in _samples(subjects, clock):
            seconds = sample()
            if number:
                rounds.append(seconds)
        readings += [reader.seconds(clock) for _ in range(_CALLS)]
        on_round()
    return min(readings)


def _samples(subjects: Sequence[Subject], clock: Clock) -> Iterator[tuple[list[float], Callable[[], float]]]:
    """Yield where the seconds of each setting go, and what measures them."""
    for subject in subjects:
        for shape in subject.shapes:
            yield subject.seconds.setdefault(shape, []), partial(_time_calls, subject, shape, clock)
        yield subject.prefill_s, partial(_time_prefill, subject, clock)


def _time_calls(subject: Subject, shape: Shape, clock: Clock) -> float:
    """Return the seconds of a call, the mean of several one after the other."""
    (rows, context), engine = shape, subject.engine
    tokens = subject.tokens[context : context + rows]
    start = 0.0
    for number in range(_CALLS + 1):
        if number == 1:
            start = clock()
        engine.kv_length = context  # backwards or forwards: the buffers are full, and calls write what is there
        engine.forward(tokens, context, rows)
    return (clock() - start) / _CALLS


def _time_prefill(subject: Subject, clock: Clock) -> float:
    subject.engine.rollback(0)
    start = clock()
    subject.engine.prefill(subject.tokens[: subject.prefill_tokens])
    return clock() - start


def call_costs(subject: Subject, narrowest: int, gb_per_s: float) -> list[CallCost]:
    """Return the costs of a subject's calls from the seconds of its rounds, by context and rows."""
    median = {shape: statistics.median(seconds) for shape, seconds in subject.seconds.items()}
    costs = []
    for rows, context in subject.shapes:
        seconds, rounds = median[rows, context], subject.seconds[rows, context]
        num_bytes = subject.spec.weight_bytes + (context + rows) * kv_bytes_per_token(subject.spec)
        floor_s = num_bytes / gb_per_s / 1e9
        costs.append(
            CallCost(
                engine=subject.name,
                rows=rows,
                context=context,
                seconds=seconds,
                spread=(max(rounds) - min(rounds)) / seconds,
                num_bytes=num_bytes,
                gb_per_s=num_bytes / seconds / 1e9,
                floor_s=floor_s,
                over_floor=seconds / floor_s,
                over_one=seconds / median[1, context],
                over_narrowest=seconds / median[narrowest, context],
            )
        )
    return costs


def kv_bytes_per_token(spec: EngineSpec) -> int:
    """Return the bytes of one token in the KV buffers."""
    return kv_bytes(spec) // spec.slots


def _subject(model: LanguageModel, name: str, engine: Engine, shapes: tuple[Shape, ...], context: int) -> Subject:
    spec = model.manifest.engines[name]
    chunks = math.ceil(max(context, 1) / spec.prefill_width)
    longest = max(rows + at for rows, at in shapes)
    return Subject(
        spec=spec, name=name, engine=engine, shapes=shapes,
        tokens=np.random.default_rng(0).integers(0, spec.vocab_size, longest).tolist(),
        prefill_tokens=min(chunks * spec.prefill_width, longest),
    )  # fmt: skip


def _facts(subject: Subject) -> EngineFacts:
    return EngineFacts(
        name=subject.name, model=subject.spec.model.name, precision=subject.spec.precision,
        weight_bytes=subject.spec.weight_bytes, kv_bytes=kv_bytes_per_token(subject.spec),
        prefill_tokens=subject.prefill_tokens,
        prefill_tokens_per_s=subject.prefill_tokens / statistics.median(subject.prefill_s),
    )  # fmt: skip
