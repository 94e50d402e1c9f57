"""`specrt bench --engine`: what is measured, in which order, and what is computed from it. No test asserts a speed."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specrt import LanguageModel, RequestError
from specrt.cost_model import break_even_acceptance, expected_tokens
from specrt.engine_bench import (
    Subject,
    call_costs,
    kv_bytes_per_token,
    measure,
    num_rounds,
    plan,
    resolve_context,
    run_engine_bench,
)
from specrt.engine_costs import (
    BreakEven,
    EngineReport,
    break_even,
    format_report,
)
from toy import ToyEngine


class Clock:
    """Time that passes only where a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedEngine(ToyEngine):
    """A toy engine whose calls take `cost(rows, context)` seconds; they are written to `log`."""

    def __init__(self, clock: Clock, log: list[Any], **named: Any) -> None:
        super().__init__(**named)
        self.clock, self.log = clock, log
        self.cost = lambda rows, context: 10.0 * rows + context

    def forward(self, token_ids: Sequence[int], start: int, width: int) -> NDArray[np.float32]:
        rows = super().forward(token_ids, start, width)
        assert len(rows) == width, "every row is a token"
        self.log.append((width, start))
        self.clock.now += self.cost(width, start)
        return rows

    def prefill(self, token_ids: Sequence[int]) -> None:
        super().prefill(token_ids)
        self.log.append(("prefill", self.kv_length))
        self.clock.now += 1000.0


class Reader:
    """Readings of memory that take the given seconds."""

    def __init__(self, log: list[Any], seconds: Sequence[float]) -> None:
        self.log, self.left = log, list(seconds)

    def seconds(self, clock: Clock) -> float:
        self.log.append("memory")
        return self.left.pop(0)


SPEC: Any = SimpleNamespace(  # two layers with 3 heads of 4 values
    weight_bytes=1000,
    slots=80,
    inputs=[
        SimpleNamespace(name=f"past_{kind}.{n}", dtype="float32", shape=(1, 3, 80, 4))
        for kind in ("key", "value")
        for n in (0, 1)
    ],
)


@pytest.fixture
def timed() -> SimpleNamespace:
    """A subject on a toy engine, with its clock and log."""
    clock, log = Clock(), []
    engine: Any = TimedEngine(clock, log, vocab_size=5, capacity=64)
    subject = Subject(
        spec=SPEC, name="target", engine=engine, shapes=((1, 8), (2, 8), (1, 30)),
        tokens=[1, 2, 3, 4] * 8, prefill_tokens=16,
    )  # fmt: skip
    return SimpleNamespace(clock=clock, log=log, engine=engine, subject=subject)


def run(timed: SimpleNamespace, *, repeats: int, readings: Sequence[float] = (1.0,) * 20) -> float:
    return measure(
        [timed.subject], Reader(timed.log, readings), repeats=repeats, on_round=lambda: timed.log.append("round"),
        clock=timed.clock,
    )  # fmt: skip


def test_every_round_visits_all_settings_in_turn(timed: SimpleNamespace) -> None:
    run(timed, repeats=2)
    a_round = [*[(1, 8)] * 4, *[(2, 8)] * 4, *[(1, 30)] * 4, ("prefill", 16), *["memory"] * 3, "round"]
    assert timed.log == [("prefill", 32), *a_round * num_rounds(2)]
    assert num_rounds(2) == 3


def test_the_first_round_and_the_first_call_of_a_setting_are_not_counted(timed: SimpleNamespace) -> None:
    calls: dict[tuple[int, int], int] = {}

    def cost(rows: int, context: int) -> float:
        number = calls[rows, context] = calls.get((rows, context), -1) + 1
        return 1e6 if number < 4 or number % 4 == 0 else 10.0 * rows + context + number % 4

    timed.engine.cost = cost
    run(timed, repeats=2)
    assert timed.subject.seconds == {(1, 8): [20.0] * 2, (2, 8): [30.0] * 2, (1, 30): [42.0] * 2}
    assert timed.subject.prefill_s == [1000.0] * 2


def test_the_bandwidth_is_that_of_the_fastest_reading(timed: SimpleNamespace) -> None:
    assert run(timed, repeats=2, readings=[5.0, 3.0, 4.0, 6.0, 2.0, *[7.0] * 4]) == 2.0


def test_costs_are_computed_from_the_median_round(timed: SimpleNamespace) -> None:
    timed.subject.seconds = {(1, 8): [4.0, 2.0, 9.0], (2, 8): [5.0, 5.0, 5.0], (1, 30): [8.0, 8.0, 6.0]}
    timed.subject.shapes = ((1, 8), (2, 8), (1, 30), (2, 30))
    timed.subject.seconds[2, 30] = [16.0]
    costs = call_costs(timed.subject, 2, 1e-6)
    assert kv_bytes_per_token(SPEC) == 2 * 2 * 3 * 4 * 4
    assert [(cost.rows, cost.context, cost.num_bytes) for cost in costs] == [
        (1, 8, 1000 + 9 * 192), (2, 8, 1000 + 10 * 192), (1, 30, 1000 + 31 * 192), (2, 30, 1000 + 32 * 192),
    ]  # fmt: skip
    assert [(c.seconds, c.spread, c.over_one, c.over_narrowest) for c in costs] == [
        (4.0, 7 / 4, 1.0, 4 / 5), (5.0, 0.0, 5 / 4, 1.0), (8.0, 2 / 8, 1.0, 1 / 2), (16.0, 0.0, 2.0, 1.0),
    ]  # fmt: skip
    first = costs[0]  # 2728 bytes at 1000 bytes/s
    assert (first.floor_s, first.over_floor) == (pytest.approx(2.728), pytest.approx(4 / 2.728))
    assert first.gb_per_s == pytest.approx(2728 / 4 / 1e9)


LADDER = (2, 4, 6, 10, 16)


def test_rows_are_those_of_decoding_verification_and_two_more() -> None:
    shapes = plan(LADDER, 5, context=256, capacity=2048)
    assert [rows for rows, context in shapes if context == 256] == [1, 2, 4, 6, 8, 10, 16, 32]
    assert [shape for shape in shapes if shape[1] != 256] == [
        (rows, context) for context in (0, 1024, 2042) for rows in (1, 2, 6)
    ]
    assert len(set(shapes)) == len(shapes)


@pytest.mark.parametrize(("k", "widths"), [(0, {1, 2}), (3, {1, 2, 4}), (4, {1, 2, 6}), (40, {1, 2, 16})])
def test_context_lengths_are_compared_at_the_width_that_verifies_k_tokens(k: int, widths: set[int]) -> None:
    assert {rows for rows, context in plan(LADDER, k, context=256, capacity=2048) if context == 1024} == widths


@pytest.mark.parametrize("context", [0, 100, 112])
@pytest.mark.parametrize("k", [0, 3, 15, 40])
def test_only_calls_that_fit_are_planned(context: int, k: int) -> None:
    shapes = plan(LADDER, k, context=context, capacity=128)
    assert all(rows + at <= 128 and at >= 0 for rows, at in shapes)
    assert {rows for rows, at in shapes if at == context} >= {1, *LADDER}
    for at in {at for _, at in shapes}:
        assert {rows for rows, length in shapes if length == at} >= {1, 2}, "ratios need 1 row and the narrowest width"


def test_a_ladder_with_one_width_and_a_short_capacity_will_do() -> None:
    assert plan((2,), 5, context=1, capacity=4) == ((1, 1), (2, 1), (1, 0), (2, 0), (1, 2), (2, 2))


def test_the_context_has_a_default_that_fits_and_one_that_does_not_is_refused() -> None:
    assert resolve_context(None, widest=16, capacity=2048) == 256
    assert resolve_context(None, widest=16, capacity=128) == 64
    assert resolve_context(None, widest=16, capacity=20) == 4
    assert resolve_context(112, widest=16, capacity=128) == 112
    for context in (113, -1):
        with pytest.raises(RequestError, match=rf"^context: expected 0 to 112, .*, found {context}: choose a shorter"):
            resolve_context(context, widest=16, capacity=128)


@pytest.mark.parametrize(
    ("block_efficiency", "k", "acceptance"),
    [(1.5, 1, 0.5), (1.75, 2, 0.5), (1.875, 3, 0.5), (1.328125, 3, 0.25), (3.439, 3, 0.9)],
)
def test_break_even_acceptance_solves_the_sum_of_powers(block_efficiency: float, k: int, acceptance: float) -> None:
    assert break_even_acceptance(block_efficiency, k) == pytest.approx(acceptance)
    assert expected_tokens(acceptance, k) == pytest.approx(block_efficiency)


def test_a_step_that_costs_no_more_than_a_call_always_pays_and_one_beyond_k_plus_1_never() -> None:
    assert [break_even_acceptance(cost, 3) for cost in (0.5, 1.0)] == [0.0, 0.0]
    assert [break_even_acceptance(cost, 3) for cost in (4.0, 9.0)] == [None, None]
    assert (break_even_acceptance(1.0, 0), break_even_acceptance(1.1, 0)) == (0.0, None)
    assert break_even_acceptance(3.999, 3) == pytest.approx(1, abs=1e-3)


def test_break_even_is_the_verify_call_and_k_draft_calls() -> None:
    seconds = {("target", 1): 10.0, ("target", 2): 12.0, ("target", 4): 16.0, ("draft", 1): 2.0}
    entries = break_even(seconds, (2, 4), {"ngram": None, "model": "draft"})
    found = [(e.drafter, e.k, e.draft_cost_ratio, round(e.block_efficiency, 9)) for e in entries]
    assert found == [("ngram", 1, 0.0, 1.2), ("ngram", 3, 0.0, 1.6), ("model", 1, 0.2, 1.4), ("model", 3, 0.2, 2.2)]
    assert [entry.acceptance for entry in entries][:3:2] == [pytest.approx(0.2), pytest.approx(0.4)]


@pytest.fixture
def report(tiny_model: LanguageModel) -> EngineReport:
    """What is measured on the tiny artifact."""
    return run_engine_bench(tiny_model, threads=1, context=None, repeats=1, on_round=lambda: None)


def test_target_and_draft_of_an_artifact_are_measured(tiny_model: LanguageModel, report: EngineReport) -> None:
    assert [(engine.name, engine.precision) for engine in report.engines] == [("target", "fp32"), ("draft", "int4")]
    assert [engine.kv_bytes for engine in report.engines] == [2 * 2 * 2 * 16 * 4] * 2
    assert (report.context, report.threads, report.repeats) == (64, 1, 1)
    shapes = plan(report.verify_widths, 3, context=64, capacity=128)
    expected = [(engine, *shape) for engine in ("target", "draft") for shape in shapes]
    assert [(call.engine, call.rows, call.context) for call in report.calls] == expected
    assert [(e.drafter, e.k) for e in report.break_even] == [
        (name, width - 1) for name in tiny_model.manifest.all_drafters for width in report.verify_widths
    ]
    one = {call.engine: call.seconds for call in report.calls if (call.rows, call.context) == (1, 64)}
    ratios = {entry.drafter: entry.draft_cost_ratio for entry in report.break_even}
    assert ratios == {"ngram": 0.0, "suffix": 0.0, "model": one["draft"] / one["target"]}


def test_the_arithmetic_of_a_report_holds_together(report: EngineReport) -> None:
    facts = {engine.name: engine for engine in report.engines}
    for call in report.calls:
        assert call.num_bytes == facts[call.engine].weight_bytes + 512 * (call.context + call.rows)
        assert call.gb_per_s == pytest.approx(call.num_bytes / call.seconds / 1e9)
        assert call.over_floor == pytest.approx(report.gb_per_s / call.gb_per_s)
    assert all(engine.prefill_tokens == 64 and engine.prefill_tokens_per_s > 0 for engine in report.engines)


def test_the_model_answers_as_before_after_a_measurement(tiny_model: LanguageModel) -> None:
    before = tiny_model.generate([5, 9, 9, 5], max_tokens=20, ignore_eos=True, drafter="model").token_ids
    rounds: list[None] = []
    run_engine_bench(tiny_model, threads=1, context=7, repeats=2, on_round=lambda: rounds.append(None))
    assert len(rounds) == num_rounds(2)
    after = tiny_model.generate([5, 9, 9, 5], max_tokens=20, ignore_eos=True, drafter="model").token_ids
    assert after == before


def test_a_report_is_json(report: EngineReport) -> None:
    data = json.loads(json.dumps(asdict(report)))
    assert data["break_even"][0]["k"] == 1


def test_the_tables_have_a_line_per_call_and_drafter_in_columns(report: EngineReport) -> None:
    never = BreakEven(drafter="model", k=3, draft_cost_ratio=2.0, block_efficiency=9.0, acceptance=None)
    text = format_report(replace(report, break_even=(*report.break_even, never)))
    head, calls, ends = text.split("\n\n")[0], text.split("\n\n")[1:-1], text.split("\n\n")[-1]
    assert len(head.splitlines()) == 4
    lines = [line for block in calls for line in block.splitlines()]
    assert len(lines) == 2 + len(report.calls)
    assert len({len(line) for line in lines}) == 1, "columns are out of line"
    assert "T/T(2)" in lines[0]
    lines = ends.splitlines()
    assert len(lines) == 2 + len(report.break_even) + 1
    assert len({len(line) for line in lines}) == 1, "columns are out of line"
    assert lines[-1].split() == ["model", "3", "2.000", "9.00", "never"]
