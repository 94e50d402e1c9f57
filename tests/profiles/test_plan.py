"""What a manifest says about a plan fits the engine that the plan is."""

import re
from dataclasses import replace

import pytest

from specrt_profiles.plan import Alias, PlanShape, PlanSpec, call_shapes, kv_aliases, plan_problem
from specrt_profiles.profile import Profile
from specrt_profiles.tensors import DecoderDims, graph_inputs

DIMS = DecoderDims(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, hidden_size=16, vocab_size=32)
INPUTS = graph_inputs(DIMS, Profile(name="small", capacity=64, prefill_width=8, dialect="tensorrt"))
PLAN = PlanSpec(
    builder="tensorrt-rtx", version="1.7.1.116", compute_capabilities=("8.9",), output="logits", source="0" * 64,
    shapes=call_shapes(8, (2, 4), with_decode=False), aliases=kv_aliases(INPUTS),
)  # fmt: skip


def problem(plan: PlanSpec) -> str | None:
    return plan_problem(plan, prefill_width=8, verify_widths=(2, 4), inputs=INPUTS)


def test_prefill_wants_no_logits_and_verify_wants_those_of_every_row() -> None:
    assert [(shape.name, shape.width, shape.rows) for shape in call_shapes(8, (2, 4), with_decode=True)] == [
        ("prefill", 8, 0), ("verify", 2, 2), ("verify", 4, 4), ("decode", 1, 1),
    ]  # fmt: skip


def test_each_buffer_is_updated_in_place() -> None:
    names = [(alias.input, alias.output) for alias in kv_aliases(INPUTS)]
    assert names == [(f"past_{part}.{i}", f"present_{part}.{i}") for i in (0, 1) for part in ("key", "value")]


def test_a_plan_with_or_without_width_one_fits_its_engine() -> None:
    assert problem(PLAN) is None
    assert problem(replace(PLAN, shapes=call_shapes(8, (2, 4), with_decode=True))) is None


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        (call_shapes(16, (2, 4), with_decode=False), r"\('prefill', 16, 0\)"),
        (call_shapes(8, (2,), with_decode=False), r"\('verify', 2, 2\)\]"),
        (call_shapes(8, (4, 2), with_decode=False), r"\('verify', 4, 4\), \('verify', 2, 2\)"),
        ((PlanShape(name="prefill", width=8, rows=1), *PLAN.shapes[1:]), r"\('prefill', 8, 1\)"),
        ((), r"\[\]"),
    ],
)
def test_shapes_that_are_not_the_calls_are_refused(shapes: tuple[PlanShape, ...], found: str) -> None:
    text = problem(replace(PLAN, shapes=shapes))
    assert text is not None
    assert text.startswith("shapes: expected prefill 8 and verify [2, 4], found [")
    assert re.search(found, text)


@pytest.mark.parametrize(
    "aliases",
    [
        (),
        PLAN.aliases[1:],
        (*PLAN.aliases, PLAN.aliases[0]),
        (*PLAN.aliases[1:], Alias(output="present_value.0", input="past_key.0")),
    ],
)
def test_buffers_that_are_not_updated_in_place_are_refused(aliases: tuple[Alias, ...]) -> None:
    assert str(problem(replace(PLAN, aliases=aliases))).startswith("aliases: expected each present_* to share")
