"""Row exactness: which widths share their bits, found on engines that keep the promise or break it."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from specrt_profiles.exactness import Exactness, find_exact_widths
from toy import RowDependentEngine, ToyEngine

WIDTHS = (2, 4, 6, 10, 16)
Rows = NDArray[np.float32]


class ChangedEngine(ToyEngine):
    """Changes the rows of a call by a rule that sees its width, its tokens and the rows' positions."""

    def __init__(self, change: Callable[[int, Sequence[int], NDArray[np.int64]], object], capacity: int = 200) -> None:
        super().__init__(capacity=capacity)
        self._change = change

    def forward(self, token_ids: Sequence[int], start: int, width: int) -> Rows:
        rows = super().forward(token_ids, start, width)
        change = np.asarray(self._change(width, token_ids, np.arange(start, start + len(token_ids))), np.float32)
        return rows + np.broadcast_to(change, len(rows))[:, None]


def find(engine: ToyEngine, widths: Sequence[int] = WIDTHS) -> Exactness:
    return find_exact_widths(engine.forward, widths, vocab_size=engine.vocab_size, capacity=engine.capacity)


def test_an_exact_engine_gives_one_group() -> None:
    found = find(ToyEngine(capacity=200))
    assert found == Exactness(groups=(WIDTHS,), dependent=())
    assert found.ladder(WIDTHS) == WIDTHS


def test_rows_that_depend_on_the_last_one_make_every_width_dependent() -> None:
    found = find(RowDependentEngine(capacity=200))
    assert found == Exactness(groups=(), dependent=WIDTHS)
    assert found.ladder(WIDTHS) == ()


@pytest.mark.parametrize("width", [2, 16, 32, 64])
def test_dependence_is_found_in_a_width_of_any_size(width: int) -> None:
    engine = ChangedEngine(lambda w, tokens, _: 0.01 * tokens[-1] * (w == width))
    found = find(engine, (2, 4, 16, 32, 64))
    assert found.dependent == (width,)


def test_a_width_that_rounds_differently_is_a_group_of_its_own() -> None:
    found = find(ChangedEngine(lambda width, *_: 1e-6 * (width == 4)))
    assert found == Exactness(groups=((2, 6, 10, 16), (4,)), dependent=())
    assert found.ladder(WIDTHS) == (2, 6, 10, 16)


def test_a_single_bit_in_a_single_row_splits_a_group() -> None:
    found = find(ChangedEngine(lambda width, _, positions: 1e-6 * (positions == 140) * (width == 6)))
    assert (6,) in found.groups


def test_a_difference_after_a_long_context_only_splits_a_group() -> None:
    found = find(ChangedEngine(lambda width, _, positions: 1e-6 * (positions > 100) * (width < 6)))
    assert found.groups == ((2, 4), (6, 10, 16))


def test_rows_that_depend_on_their_place_in_the_call_are_dependent() -> None:
    found = find(ChangedEngine(lambda width, _, positions: 1e-6 * (positions - positions[0]) * (width == 10)))
    assert found.dependent == (10,)


def test_the_prefill_width_is_grouped_but_never_a_rung() -> None:
    found = find(ToyEngine(capacity=200), (*WIDTHS, 64))
    assert found.groups == ((*WIDTHS, 64),)
    assert found.ladder(WIDTHS) == WIDTHS


def test_the_ladder_is_the_group_with_most_verify_widths() -> None:
    exactness = Exactness(groups=((2,), (4, 6), (10, 16, 64)), dependent=())
    assert exactness.ladder((2, 4, 6, 10)) == (4, 6)


def test_a_tie_goes_to_the_wider_group() -> None:
    exactness = Exactness(groups=((2, 16), (4, 6), (64,)), dependent=())
    assert exactness.ladder(WIDTHS) == (2, 16)
    assert Exactness(groups=((64,),), dependent=()).ladder(WIDTHS) == ()


@pytest.mark.parametrize("capacity", [2, 3, 4, 5, 8, 17, 18, 19, 20, 130, 131, 146, 147, 148])
def test_no_capacity_is_overrun(capacity: int) -> None:
    assert find(ToyEngine(capacity=capacity, prefill_width=64), (*WIDTHS, 64)).groups == ((*WIDTHS, 64),)


def test_few_calls_are_made() -> None:
    engine = ToyEngine(capacity=2048)
    find(engine)
    assert len(engine.widths_used) < 120
    assert engine.kv_length < 200


def test_widths_agree_if_one_group_holds_them_all() -> None:
    exact = Exactness(((2, 4, 64), (6, 10)), (16,))
    assert exact.agree((2, 4, 64))
    assert exact.agree((6,))
    assert not exact.agree((4, 6))
    assert not exact.agree((4, 16))
