"""One call of a training: what it is for, how long it may take, how far it is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specrt_export.distill.data import Dataset
from specrt_export.distill.head import Layout
from specrt_export.distill.loss import block_efficiency, by_step
from specrt_export.distill.train import Training, TrainingPlan
from specrt_export.distill.writer import BatchSize
from specrt_export.progress import Progress

NUM_HEADS = 4  # of `medusa`
VOCABULARY = 6144  # tokens
_SAY_S, _SAVE_S = 20.0, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillRequest:
    """What drafter to train for which model.

    layout: of a head, whose file `out` is, or `pruned`, whose folder it is. heads, blocks: of `medusa`, how many heads
    of how many blocks each. layers: of a pruned draft, a quarter of the model's if left out, or those before an
    early exit, chosen by measuring if left out. start: a head of the same layout to begin with, whose width and tokens
    are kept. tokens: to be written in all. work: where text, features and checkpoints are kept. minutes: after which
    this call ends, finished or not. command: how it was called, for the card.
    """

    model: str
    layout: Layout | Literal["medusa", "early-exit", "pruned"]
    out: Path
    work: Path
    tokens: int
    cache_dir: Path
    prompts: Path | None = None
    revision: str | None = None
    minutes: float | None = None
    vocabulary_size: int = VOCABULARY
    ffn: int | None = None
    start: Path | None = None
    heads: int = NUM_HEADS
    blocks: int = 1
    layers: int | None = None
    threads: int = 1
    training: TrainingPlan = field(default_factory=TrainingPlan)
    size: BatchSize = field(default_factory=BatchSize)
    command: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One call: what it is for, where it reports, and when it ends."""

    request: DistillRequest
    progress: Progress
    clock: Callable[[], float]
    end: float | None

    def out_of_time(self) -> bool:
        """Tell whether the minutes are over."""
        return self.end is not None and self.clock() >= self.end


class OutOfTimeError(Exception):
    """The minutes of this call are over."""


def train_on(call: Call, trainer: Training, held: Dataset, path: Path, about: dict[str, Any]) -> None:
    """Train to the end, or until the minutes are over; report and keep checkpoints on the way."""
    state = trainer.state
    meter = Meter(call, "train", state.updates - state.update, unit="updates")
    saved = call.clock()
    while state.update < state.updates and not call.out_of_time():
        state = trainer.update()
        meter.add(1, f"loss {state.loss:.3f}")
        if call.clock() - saved >= _SAVE_S:
            trainer.save(path, about)
            agreed = trainer.measure(held)
            steps = ", ".join(f"{value:.1%}" for value in by_step(agreed))
            call.progress.say(f"    agreement by step {steps}; tokens per call {block_efficiency(agreed):.2f}")
            saved = call.clock()
    trainer.save(path, about)


class Meter:
    """Says now and then how far a piece of work is, how fast it goes and how long it will take."""

    def __init__(self, call: Call, title: str, total: int, *, unit: str = "tokens") -> None:
        self._call, self._title, self._total, self._unit = call, title, total, unit
        self._begin = self._said = call.clock()
        self._done = 0

    def add(self, count: int, note: str = "") -> None:
        """Count something as done."""
        self.reached(self._done + count, note)

    def reached(self, done: int, note: str = "") -> None:
        """Set how much is done."""
        self._done = done
        now = self._call.clock()
        if done and now - self._said >= _SAY_S:
            self._said = now
            rate = done / (now - self._begin)
            left = max(0, self._total - done) / rate / 60
            ending = f", {note}" if note else ""
            self._call.progress.say(
                f"  {self._title}: {done:,} of {self._total:,} {self._unit}, {rate:.3g} per second, "
                f"about {left:.0f} min left{ending}"
            )
