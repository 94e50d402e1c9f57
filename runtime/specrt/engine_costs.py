"""What calls of an engine cost, and what speculation has to bring in before it pays.

T(n) is the time of a call with n rows, logits of every row included. In a step with k draft tokens the target makes
one call of k + 1 rows and the draft k calls of one row; c = T_draft(1) / T(1) is the **draft cost ratio**. Such a step
costs T(k + 1) / T(1) + k c plain calls, so it has to give that many tokens to be worth its time: the **break-even block
efficiency**. The **break-even acceptance** is the alpha of `specrt.cost_model` that gives it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrt.cost_model import break_even_acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """One engine of the artifact.

    weight_bytes: what a call reads of its weights. kv_bytes: KV buffers per token. prefill_tokens: how long the prompt
    was whose reading is measured in tokens per second.
    """

    name: str
    model: str
    precision: str
    weight_bytes: int
    kv_bytes: int
    prefill_tokens: int
    prefill_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """A call of `rows` rows behind `context` tokens in the KV buffers.

    seconds: the median of the rounds; spread: (slowest - fastest) / median. num_bytes: weights, and the KV slots of
    context and rows, each once; gb_per_s: they over seconds. floor_s: they over the memory bandwidth; over_floor:
    seconds over that. over_one and over_narrowest: seconds over those of a call of 1 row, and of the narrowest verify
    width, which the loop's plain steps take, at the same context.
    """

    engine: str
    rows: int
    context: int
    seconds: float
    spread: float
    num_bytes: int
    gb_per_s: float
    floor_s: float
    over_floor: float
    over_one: float
    over_narrowest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """What k draft tokens per step have to bring in, at the report's context.

    draft_cost_ratio: c, 0 for drafters that are not engines. block_efficiency: tokens per step at which speculation is
    as fast as plain calls of 1 row. acceptance: the alpha that gives them; 0 if a step always pays, None if none below
    1 does.
    """

    drafter: str
    k: int
    draft_cost_ratio: float
    block_efficiency: float
    acceptance: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Everything that `specrt bench --engine` measured.

    context: tokens in the KV buffers where rows are compared. verify_widths: the target's ladder here. gb_per_s: the
    memory bandwidth, the best of all reads of read_bytes with `threads` threads.
    """

    machine: str
    engine_version: str
    threads: int
    repeats: int
    context: int
    verify_widths: tuple[int, ...]
    read_bytes: int
    gb_per_s: float
    engines: tuple[EngineFacts, ...]
    calls: tuple[CallCost, ...]
    break_even: tuple[BreakEven, ...]


def break_even(
    seconds: Mapping[tuple[str, int], float], verify_widths: Sequence[int], drafters: Mapping[str, str | None]
) -> tuple[BreakEven, ...]:
    """Return an entry per drafter and verify width.

    seconds: of a call, by engine and rows. drafters: the engine of each, None for those that cost nearly nothing.
    """
    found = []
    for drafter, engine in drafters.items():
        ratio = seconds[engine, 1] / seconds["target", 1] if engine else 0.0
        for rows in verify_widths:
            k = rows - 1
            cost = seconds["target", rows] / seconds["target", 1] + k * ratio
            found.append(
                BreakEven(
                    drafter=drafter,
                    k=k,
                    draft_cost_ratio=ratio,
                    block_efficiency=cost,
                    acceptance=break_even_acceptance(cost, k),
                )
            )
    return tuple(found)


def format_report(report: EngineReport) -> str:
    """Return the report as text tables."""
    head = [
        f"{report.machine}, {report.threads} threads, {report.engine_version}, median of {report.repeats} rounds",
        f"memory: {report.gb_per_s:.1f} GB/s, best reading of {report.read_bytes / 2**20:.0f} MiB",
        *(_engine_line(engine) for engine in report.engines),
    ]
    return "\n".join([*head, "", *_call_lines(report), "", *_break_even_lines(report)])


def _engine_line(engine: EngineFacts) -> str:
    return (
        f"{engine.name}: {engine.model} at {engine.precision}, {engine.weight_bytes / 1e6:.1f} MB of weights per call, "
        f"{engine.kv_bytes / 1e3:.1f} kB of KV per token, prefill {engine.prefill_tokens_per_s:.0f} tokens/s "
        f"({engine.prefill_tokens} tokens)"
    )


def _call_lines(report: EngineReport) -> list[str]:
    width = max(len("engine"), *(len(engine.name) for engine in report.engines))
    narrowest = f"T/T({report.verify_widths[0]})"
    head = (
        f"{'engine':<{width}}  context  rows  ms/call  spread       MB   GB/s  floor ms  x floor  T/T(1)  {narrowest}"
    )
    lines = [head, "-" * len(head)]
    previous = None
    for call in report.calls:
        if previous not in (None, (call.engine, call.context)):
            lines.append("")
        previous = (call.engine, call.context)
        lines.append(
            f"{call.engine:<{width}}  {call.context:>7}  {call.rows:>4}  {1e3 * call.seconds:>7.2f}  "
            f"{call.spread:>6.0%}  {call.num_bytes / 1e6:>7.1f}  {call.gb_per_s:>5.1f}  {1e3 * call.floor_s:>8.2f}  "
            f"{call.over_floor:>7.2f}  {call.over_one:>6.2f}  {call.over_narrowest:>{len(narrowest)}.2f}"
        )
    return lines


def _break_even_lines(report: EngineReport) -> list[str]:
    width = max(len("drafter"), *(len(entry.drafter) for entry in report.break_even))
    head = f"{'drafter':<{width}}   k  draft cost ratio  break-even block eff.  break-even acceptance"
    lines = [head, "-" * len(head)]
    for entry in report.break_even:
        acceptance = "never" if entry.acceptance is None else f"{entry.acceptance:.0%}"
        lines.append(
            f"{entry.drafter:<{width}}  {entry.k:>2}  {entry.draft_cost_ratio:>16.3f}  "
            f"{entry.block_efficiency:>21.2f}  {acceptance:>21}"
        )
    return lines
