"""What a peer has to be able to do, and what one run of it gives. Imported in every peer's environment: NumPy only."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MODES = PLAIN, NGRAM, DRAFT = "plain", "ngram", "draft"
PLAIN_ONE = "plain-1"  # SpecRT's fastest plain decoding, which rounds differently from its speculation
AUTO = "auto"  # SpecRT with all that an artifact has: lookup and draft model or head combined, adaptive k


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model in the forms that peers convert from, and the folder of its converted form."""

    source: Path
    gguf: Path
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker is to run. context: most tokens of a sequence, prompt and output together.

    mode: what decoding the process will be asked for, or None for all of them.
    """

    variant: str
    target: Model
    draft: Model | None
    mode: str | None
    threads: int
    context: int

    @property
    def precision(self) -> str:
        """The variant without its suffix: what the weights on disk are."""
        return self.variant.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The new tokens of one run; `num_timed` of them took `decode_s` seconds, the prompt before took `prompt_s`."""

    ids: list[int]
    num_timed: int
    decode_s: float
    prompt_s: float


class UnavailableError(Exception):
    """A peer cannot do this, for the reason given."""


class Peer(ABC):
    """One library at one precision. Greedy, end tokens ignored, token ids in and out.

    A module's class `Runner` is one; its worker prepares or opens it once, and asks it from there on.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def prepare(self) -> None:  # noqa: B027
        """Convert the models into their folders, where that has not been done and the library needs it."""

    @abstractmethod
    def open(self) -> None:
        """Load the model, ready for every mode of the job."""

    @abstractmethod
    def generate(self, ids: Sequence[int], n: int, mode: str, k: int) -> Generation:
        """Continue `ids` with n tokens; k: most tokens per proposal, without meaning in plain mode."""

    @abstractmethod
    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits [len(ids), V] of a text; raises `UnavailableError` where the library keeps them."""

    def size(self) -> int:
        """Return the bytes on disk of what the library loads as target."""
        return self._job.target.gguf.stat().st_size


class Arrivals:
    """Takes the time whenever tokens arrive.

    What arrives first comes with the reading of the prompt, so the tokens after it are timed from there: a first
    block of several tokens counts as one arrival and earns nothing.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first = self._last = self._start
        self._num_first = self._count = 0

    def add(self, count: int = 1) -> None:
        """Note that `count` more tokens are there."""
        self._last = time.perf_counter()
        if self._count == 0:
            self._first, self._num_first = self._last, count
        self._count += count

    def generation(self, ids: Sequence[int]) -> Generation:
        """Return the run whose new tokens are `ids`."""
        return Generation(
            ids=[int(token) for token in ids],
            num_timed=self._count - self._num_first,
            decode_s=self._last - self._first,
            prompt_s=self._first - self._start,
        )


def folder_size(folder: Path, *patterns: str) -> int:
    """Return the bytes of the files in `folder` that match one of the patterns."""
    return sum(path.stat().st_size for path in {p for pattern in patterns for p in folder.glob(pattern)})
