"""What a TensorRT plan was built for: builder, devices, call shapes, and which outputs share an input's memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specrt_profiles.profile import OutputName
from specrt_profiles.tensors import TensorSpec

BuilderName = Literal["tensorrt", "tensorrt-rtx"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanShape:
    """One TensorRT optimization profile, of a single shape: a call of `width` tokens that wants `rows` of logits."""

    name: Literal["prefill", "verify", "decode"]
    width: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """An output of the plan that has to be given the address of an input: the plan updates it in place."""

    output: str
    input: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpec:
    """Facts about a plan, taken from the network it was built from.

    `version` is the builder's: only that version opens the plan. `compute_capabilities` are those it was built for
    ("8.9"), in rising order; empty stands for the builder's default (TensorRT: the device it was built on;
    TensorRT-RTX: Ampere and later). `shapes` are the optimization profiles in the order of their indices. `output` is
    what a call gives: `logits` [B, R, V], or with others what `Profile.output` says as well. `source` is the SHA-256 of
    the manifest of the artifact that the graph is from.
    """

    builder: BuilderName
    version: str
    compute_capabilities: tuple[str, ...]
    shapes: tuple[PlanShape, ...]
    aliases: tuple[Alias, ...]
    output: OutputName
    source: str


def call_shapes(prefill_width: int, verify_widths: Sequence[int], *, with_decode: bool) -> tuple[PlanShape, ...]:
    """Return the shapes of an engine's calls: prefill, which wants no logits, each verify width, if wanted width 1."""
    shapes = [PlanShape(name="prefill", width=prefill_width, rows=0)]
    shapes += [PlanShape(name="verify", width=width, rows=width) for width in verify_widths]
    shapes += [PlanShape(name="decode", width=1, rows=1)] if with_decode else []
    return tuple(shapes)


def kv_aliases(inputs: Sequence[TensorSpec]) -> tuple[Alias, ...]:
    """Return the pairs that the contract wants bound in place, in the order of the inputs."""
    past = [spec.name for spec in inputs if spec.name.startswith("past_")]
    return tuple(Alias(output=name.replace("past_", "present_", 1), input=name) for name in past)


def plan_problem(
    plan: PlanSpec, *, prefill_width: int, verify_widths: Sequence[int], inputs: Sequence[TensorSpec]
) -> str | None:
    """Say which fact of a plan contradicts the engine it belongs to."""
    wanted = [call_shapes(prefill_width, verify_widths, with_decode=decode) for decode in (False, True)]
    if plan.shapes not in wanted:
        found = [(shape.name, shape.width, shape.rows) for shape in plan.shapes]
        return f"shapes: expected prefill {prefill_width} and verify {list(verify_widths)}, found {found}"
    if set(plan.aliases) != set(kv_aliases(inputs)) or len(plan.aliases) != len(set(plan.aliases)):
        return f"aliases: expected each present_* to share the memory of its past_*, found {len(plan.aliases)} pairs"
    return None
