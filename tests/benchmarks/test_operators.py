"""The profile of a call: every operator of the graph, and sums that are those of the calls that count."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.operators import main, table, times


def event(cat: str, name: str, ts: int, dur: int, op: str = "") -> dict[str, object]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"op_name": op}}


def test_the_operators_of_a_call_are_those_that_ran_in_it() -> None:
    events = []
    for start, one in ((0, 900), (1000, 10), (2000, 20), (3000, 60)):
        events += [event("Session", "model_run", start, 100 + one), event("Session", "other", start, 5)]
        for at, op in ((10, "Mul"), (20, "Mul"), (30, "Add")):
            events.append(event("Node", f"x{at}_kernel_time", start + at, one, op))
            events.append(event("Node", f"x{at}_fence", start + at, 500, op))
    assert times(events, 3) == pytest.approx({"call": 0.120, "Mul": 0.040, "Add": 0.020})


def test_the_lines_add_up_to_the_call() -> None:
    lines = table({1: {"call": 3.0, "A": 1.0, "B": 0.01}, 4: {"call": 5.0, "A": 2.5, "C": 0.5}}, least=0.1).splitlines()
    assert lines[0] == "| operator, ms | 1 rows | 4 rows |"
    assert lines[2:] == [
        "| A | 1.00 | 2.50 |",
        "| C | 0.00 | 0.50 |",
        "| others, and between operators | 2.00 | 2.00 |",
        "| call | 3.00 | 5.00 |",
    ]


@pytest.mark.parametrize("name", ["tiny_artifact", "exit_artifact"])
def test_a_real_call_is_taken_apart(request: pytest.FixtureRequest, name: str) -> None:
    artifact = request.getfixturevalue(name)
    result = CliRunner().invoke(
        main, [str(artifact), "--rows", "1,4", "--context", "8", "--calls", "3", "--least", "0"]
    )
    assert result.exit_code == 0, result.output
    assert "| GroupQueryAttention |" in result.output
    assert "| MatMul |" in result.output


@pytest.mark.parametrize(
    ("rows", "problem"), [("0", "rows: expected 1 to"), ("99999", "rows: expected 1 to"), ("a", "as numbers")]
)
def test_wrong_rows_are_one_line(tiny_artifact: Path, rows: str, problem: str) -> None:
    result = CliRunner().invoke(main, [str(tiny_artifact), "--rows", rows])
    assert result.exit_code != 0
    assert problem in result.output
