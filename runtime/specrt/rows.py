"""Rows of logits where they are: arrays in host memory, or on a GPU until someone asks for their values."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Row(Protocol):
    """Logits [V] of one row. Arrays are rows; `np.asarray` makes an array of any, which may take a copy from a device.

    The best token and its logit never take one.
    """

    def __len__(self) -> int:
        """Return V."""
        ...

    def argmax(self) -> Any:
        """Return the lowest id among those of the largest logit."""
        ...

    def __getitem__(self, token: int, /) -> Any:
        """Return the logit of a token."""
        ...


class Rows(Protocol):
    """Logits [n, V] of a call, valid until the engine's next one; see `Row`."""

    def __len__(self) -> int:
        """Return n."""
        ...

    def __getitem__(self, row: int, /) -> Any:
        """Return a `Row`."""
        ...


@dataclass(frozen=True, slots=True)
class Top:
    """The best tokens of a row: `ids` [K] by falling `logits` [K]. No other token's logit is above the last one.

    logsumexp: log of the sum of exp(logit) over all V, as the device rounds it (`logsumexp_error`); a finite number if
    no logit is a NaN and the largest one is finite.
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    logsumexp: float


def logsumexp_error(value: float) -> float:
    """Return how far, in nats, a device's float32 logsumexp may be from the true `value`.

    2^-13 is 2048 roundings of 2^-24 each, one upon the other: a row of 2^17 tokens in 256 partial sums takes 520, the
    differences and exp about 30. 2^-22 of the size is four roundings, where log and peak are added. What a device says
    is believed if it is within half of that for the rows of the reference (`specrt.check`).
    """
    return 2.0**-13 + 2.0**-22 * abs(value)


def top_of(row: Row) -> Top | None:
    """Return a row's best tokens if they are known without its values; those of an array are not."""
    top: Top | None = getattr(row, "top", None)
    return top
