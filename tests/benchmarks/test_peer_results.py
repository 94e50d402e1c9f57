"""From runs to rates, shares and tables."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.peers.protocol import Arrivals
from benchmarks.peers.results import Lane, LaneFacts, Run, Setting, best, setting_rows, to_json
from benchmarks.peers.tables import category_table, notes, setting_table, summary_table

LANE, OTHER = Lane("fast", "int8"), Lane("slow", "fp32")
PLAIN, THREE, FIVE = Setting("plain", 0), Setting("ngram", 3), Setting("ngram", 5)


def run(setting: Setting, seconds: float, **changes: Any) -> Run:
    one = Run(
        lane=LANE, setting=setting, prompt=0, category="chat", ids=(1, 2, 3, 4), num_timed=100, decode_s=seconds,
        prompt_s=0.1, idle_s=0.0,
    )  # fmt: skip
    return replace(one, **changes)


RUNS = [
    run(PLAIN, 2.0), run(PLAIN, 1.0), run(PLAIN, 1.2),
    run(PLAIN, 4.0, prompt=1, category="math"),
    run(PLAIN, 1.0, prompt=2, category="math", ids=(1, 9, 3, 4)),
    run(THREE, 1.0), run(THREE, 1.0, prompt=1, category="math", ids=(1, 2, 9, 9)),
    run(FIVE, 0.5), run(FIVE, 4.0, prompt=1, category="math"),
]  # fmt: skip
REFERENCE = {0: (1, 2, 3, 4), 1: (1, 2, 3, 4), 2: (1, 2, 3, 4)}
ROWS = setting_rows(RUNS, REFERENCE)
FACTS = {LANE: LaneFacts(kl=0.0123, num_bytes=141_000_000), OTHER: LaneFacts(notes=["cannot be installed: no wheel"])}


def test_a_rate_is_the_median_of_repeats_and_the_mean_of_categories() -> None:
    plain = ROWS[0]
    assert plain.by_category == pytest.approx({"chat": 100 / 1.2, "math": 200 / 5})
    assert plain.tokens_per_s == pytest.approx((100 / 1.2 + 40) / 2)


def test_seconds_count_per_timed_token() -> None:
    (row,) = setting_rows([run(PLAIN, 2.0, num_timed=50)], REFERENCE)
    assert row.tokens_per_s == pytest.approx(25)


def test_the_spread_is_that_of_the_repeats() -> None:
    (row,) = setting_rows(RUNS[:3], REFERENCE)
    assert row.spread == pytest.approx(1.0 / 1.2)


def test_equal_tokens_end_at_the_first_difference() -> None:
    assert ROWS[0].equal == pytest.approx((1 + 1 + 1 / 4) / 3)
    assert ROWS[1].equal == pytest.approx((1 + 1 / 2) / 2)


def test_speculation_is_compared_with_the_plain_run_of_its_own_lane() -> None:
    foreign = replace(RUNS[0], lane=OTHER, ids=(7, 7, 7, 7))
    rows = setting_rows([*RUNS, foreign], REFERENCE)
    assert [row.as_plain for row in rows[:3]] == [1.0, 0.5, 1.0]


def test_the_best_setting_is_one_setting_over_all_categories() -> None:
    plain, fastest = best(ROWS, LANE)  # k=3: (100 + 100) / 2, k=5: (200 + 25) / 2
    assert plain is not None
    assert fastest is not None
    assert (plain.setting, fastest.setting) == (PLAIN, FIVE)
    assert best(ROWS, OTHER) == (None, None)


def test_a_mode_without_k_is_plain_only_if_nothing_is_guessed() -> None:
    one, auto = Setting("plain-1", 0), Setting("auto", 0)
    rows = setting_rows([*RUNS, run(one, 0.1), run(auto, 0.2)], REFERENCE)
    plain, fastest = best(rows, LANE)
    assert plain is not None
    assert fastest is not None
    assert (plain.setting, fastest.setting) == (one, auto)


def test_the_summary_has_a_line_per_lane_also_without_runs() -> None:
    lines = summary_table(ROWS, FACTS).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")][1:-1] == [
        "fast", "int8", "61.7", "112.5 (ngram k=5)", "1.82 x", "0.012", "141", "75%", "100%", "0%",
    ]  # fmt: skip
    assert [cell.strip() for cell in lines[3].split("|")][1:-1] == ["slow", "fp32", *"--------"]
    assert notes(FACTS) == ["slow fp32: cannot be installed: no wheel"]


def test_the_other_tables_have_every_setting_and_category() -> None:
    assert [line.split("|")[3].strip() for line in setting_table(ROWS).splitlines()[2:]] == [
        "plain", "ngram k=3", "ngram k=5",
    ]  # fmt: skip
    head, _, line = category_table(ROWS, FACTS).splitlines()
    assert [cell.strip() for cell in head.split("|")][3:-1] == ["chat", "math"]
    assert [cell.strip() for cell in line.split("|")][3:-1] == ["83 / 200", "40 / 25"]


def test_the_json_has_every_run_flat() -> None:
    data = to_json(ROWS, FACTS, RUNS)
    assert len(data["runs"]) == len(RUNS)
    assert data["runs"][5] | {"peer": "fast", "variant": "int8", "mode": "ngram", "k": 3} == data["runs"][5]
    assert data["lanes"][0]["num_bytes"] == 141_000_000


def test_tokens_that_arrive_first_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.0, 13.0, 15.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    arrivals = Arrivals()
    for count in (3, 1, 4):
        arrivals.add(count)
    generation = arrivals.generation(range(8))
    assert (generation.num_timed, generation.decode_s, generation.prompt_s) == (5, 3.5, 2.0)
    assert generation.ids == list(range(8))
