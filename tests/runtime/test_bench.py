"""`specrt bench`: every setting on every prompt in turn, against the fastest plain decoding, tokens compared."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
from specrt import LanguageModel, SpecRTError, Statistics
from specrt.bench import PLAIN, PLAIN_ONE, BenchRow, OneRowEngine, _row, _Setting, format_table, num_runs, run_bench
from specrt.prompts import BenchPrompt
from specrt.tune import run_tune
from toy import ToyEngine

PROMPTS = [
    BenchPrompt("code", "def mean(values):"),
    BenchPrompt("chat", "the quick brown"),
    BenchPrompt("code", "return sum(values)"),
]
Run = Callable[..., list[BenchRow]]


@pytest.fixture
def bench(tiny_model: LanguageModel) -> Run:
    """Return a function that benchmarks the tiny model."""

    def run(**changes: Any) -> list[BenchRow]:
        arguments: dict[str, Any] = {
            "ks": [1, 3], "drafters": ["ngram", "suffix"], "repeats": 2, "chat": False,
            "options": {"max_tokens": 20, "ignore_eos": True}, "on_run": lambda: None,
        }  # fmt: skip
        return run_bench(tiny_model, PROMPTS, **{**arguments, **changes})

    return run


def test_there_is_a_row_for_every_category_and_setting(bench: Run) -> None:
    settings = [(PLAIN_ONE, None, None), (PLAIN, None, None)]
    settings += [(f"{drafter} k={k}", drafter, k) for drafter in ("ngram", "suffix") for k in (1, 3)]
    expected = [(category, *setting) for category in ("code", "chat", "all") for setting in settings]
    assert [(row.category, row.setting, row.drafter, row.k) for row in bench()] == expected


def test_tokens_are_those_of_one_run_of_each_prompt(bench: Run) -> None:
    found = {row.category: row.num_tokens for row in bench() if row.setting == "suffix k=3"}
    assert found == {"code": 40, "chat": 20, "all": 60}


def test_prompts_without_a_category_are_counted_once(tiny_model: LanguageModel) -> None:
    prompts = [BenchPrompt("all", "the quick"), BenchPrompt("all", "def mean")]
    options: Any = {"max_tokens": 5, "ignore_eos": True}
    rows = run_bench(
        tiny_model, prompts, ks=[], drafters=["ngram"], repeats=1, options=options, chat=False, on_run=lambda: None
    )
    assert [(row.category, row.setting, row.num_tokens) for row in rows] == [("all", PLAIN_ONE, 10), ("all", PLAIN, 10)]


def test_speedups_are_relative_to_both_kinds_of_plain_decoding(bench: Run) -> None:
    rows = bench()
    rate = {(row.category, row.setting): row.tokens_per_s for row in rows}
    for row in rows:
        assert row.tokens_per_s > 0
        assert row.speedup == pytest.approx(row.tokens_per_s / rate[row.category, PLAIN_ONE])
        assert row.over_plain == pytest.approx(row.tokens_per_s / rate[row.category, PLAIN])
        assert 0 <= row.rest <= 1
        assert row.spread >= 0
    assert {row.speedup for row in rows if row.setting == PLAIN_ONE} == {1.0}


def test_plain_settings_have_a_block_efficiency_of_one(bench: Run) -> None:
    for row in bench(drafters=["model"]):
        if row.setting in (PLAIN_ONE, PLAIN):
            assert (row.block_efficiency, row.acceptance_rate, row.acceptance_by_position) == (1.0, 0.0, ())
        else:
            assert row.block_efficiency > 1
            assert 0 < row.acceptance_rate <= 1


def test_only_plain_1_uses_calls_of_one_token(bench: Run, tiny_model: LanguageModel) -> None:
    target: Any = tiny_model.target
    bench(ks=[])
    assert (1, 1) in target._calls
    assert {(width, rows) for width, rows in target._calls if rows} >= {(1, 1), (2, 2)}


def test_progress_is_told_after_every_run(bench: Run) -> None:
    calls: list[None] = []
    bench(on_run=lambda: calls.append(None))
    assert len(calls) == num_runs(len(PROMPTS), ["ngram", "suffix"], [1, 3], 2) == 3 * 6 * 2


@pytest.fixture
def started(tiny_model: LanguageModel) -> list[Any]:
    """Every request that is started: prompt, options, whether it decodes in calls of one token."""
    requests: list[Any] = []
    model: Any = tiny_model
    start = model.start

    def record(prompt: Any, options: Any, *, target: Any = None, **named: Any) -> Any:
        requests.append((prompt, options, target is not None))
        return start(prompt, options, target=target, **named)

    model.start = record
    return requests


def test_every_setting_runs_once_before_anything_is_measured(bench: Run, started: list[Any]) -> None:
    bench(ks=[3, "auto"], drafters=["suffix", "model"], repeats=1)
    order = [(options["drafter"], options["k"], one_row) for _, options, one_row in started]
    drafted = [(drafter, k, False) for drafter in ("suffix", "model") for k in (3, "auto")]
    assert order == [("none", 0, True), ("none", 0, False), *drafted] * 4
    assert [options["max_tokens"] for _, options, _ in started] == [8] * 6 + [20] * 18


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_measured(tiny_model: LanguageModel) -> None:
    runs: list[None] = []
    prompts = [BenchPrompt("short", "the quick"), BenchPrompt("long", "word " * 300)]
    words = r"^prompt 2 of 2 \(long\): the prompt has \d+ tokens, the capacity is 128: shorten it"
    common: dict[str, Any] = {"repeats": 1, "options": {}, "chat": False, "on_run": lambda: runs.append(None)}
    with pytest.raises(SpecRTError, match=words):
        run_bench(tiny_model, prompts, drafters=["ngram"], ks=[1], **common)
    with pytest.raises(SpecRTError, match=words):
        run_tune(tiny_model, prompts, drafters=["ngram"], **common)
    assert not runs


def test_chat_prompts_go_through_the_template(bench: Run, started: list[Any]) -> None:
    bench(chat=True, ks=[], repeats=1)
    assert started[0][0] == [{"role": "user", "content": PROMPTS[0].text}]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_setting_that_gives_other_tokens_is_found(bench: Run, tiny_model: LanguageModel, temperature: float) -> None:
    model: Any = tiny_model
    start = model.start

    def wrong(prompt: Any, options: Any, **named: Any) -> Any:
        changed = {**options, "logit_bias": {60: 30.0}} if options["k"] == 3 else options
        return start(prompt, changed, **named)

    options = {"max_tokens": 20, "ignore_eos": True, "temperature": temperature}
    bench(options=options)
    model.start = wrong
    with pytest.raises(SpecRTError, match=r"ngram k=3 gave other tokens than plain on 'def mean\(values\):': run"):
        bench(options=options)


def test_rejection_may_give_other_tokens(bench: Run) -> None:
    options = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0, "coupling": "rejection"}
    assert len(bench(options=options, drafters=["model"])) == 12


def test_sampled_settings_share_one_seed_and_a_given_seed_is_used(bench: Run, started: list[Any]) -> None:
    bench(options={"max_tokens": 3, "temperature": 1.0})
    assert {options["seed"] for _, options, _ in started} == {0}
    started.clear()
    bench(options={"max_tokens": 3, "temperature": 1.0, "seed": 7})
    assert {options["seed"] for _, options, _ in started} == {7}


def test_a_prompt_without_output_divides_by_nothing(bench: Run) -> None:
    rows = bench(options={"max_tokens": 0})
    assert {(row.num_tokens, row.tokens_per_s, row.speedup, row.block_efficiency) for row in rows} == {(0, 0, 0, 0)}


def timed(seconds: float, tokens: int, proposals: tuple[tuple[int, int], ...] = ()) -> Statistics:
    """Return statistics of so many plain steps, and of steps with (proposed, accepted) tokens."""
    stats = Statistics(drafter="none", num_prompt_tokens=1)
    for _ in range(tokens):
        stats.count(depths=(), accepted=0, committed=1)
    for proposed, accepted in proposals:
        stats.count(depths=range(proposed), accepted=accepted, committed=accepted + 1)
    stats.draft_s, stats.verify_s, stats.rest_s, stats.prefill_s = 0.25 * seconds, 0.5 * seconds, 0.25 * seconds, 1e6
    return stats


def test_a_row_takes_the_median_of_each_prompts_repeats() -> None:
    runs = {
        ("all", PLAIN_ONE): [[timed(1.0, 10)] * 3, [timed(1.0, 10)] * 3],
        ("all", PLAIN): [[timed(2.0, 10)] * 3, [timed(2.0, 10)] * 3],
        ("all", "x k=3"): [[timed(s, 10) for s in (0.5, 9.0, 0.25)], [timed(s, 10) for s in (0.5, 0.5, 0.5)]],
    }
    row = _row("all", _Setting("x k=3", "x", 3), runs)
    assert (row.num_tokens, row.tokens_per_s, row.speedup, row.over_plain, row.rest) == (20, 20.0, 2.0, 4.0, 0.25)
    assert row.spread == pytest.approx((8.75 / 0.5 + 0) / 2)


def test_a_row_tells_what_proposals_cost_and_brought() -> None:
    some = [timed(1.0, 2, ((3, 3), (3, 1))), timed(1.0, 2, ((1, 0),))]
    runs = {("all", PLAIN_ONE): [[timed(1.0, 10)] * 2], ("all", PLAIN): [[timed(1.0, 10)] * 2], ("all", "x"): [some]}
    row = _row("all", _Setting("x", "x", 3), runs)
    assert row.acceptance_by_position == (2 / 3, 1 / 2, 1 / 2)
    assert row.acceptance_rate == pytest.approx(4 / 7)
    assert row.block_efficiency == pytest.approx((2 + 4 + 2 + 2 + 1) / 7)
    assert row.draft_cost_ratio == pytest.approx((0.5 / 7) / (1.0 / 20))


@pytest.mark.parametrize("category", ["all", "a very long category"])
def test_the_table_has_a_line_per_row_and_a_gap_between_categories(bench: Run, category: str) -> None:
    rows = bench()
    rows = [replace(row, category=category if row.category == "all" else row.category, hint=None) for row in rows]
    lines = format_table(rows).splitlines()
    assert any("suffix k=3" in line for line in lines)
    assert len(lines) == 2 + len(rows) + 2
    assert lines.count("") == 2
    assert len({len(line) for line in lines if line}) == 1, "columns are out of line"


def test_one_row_engine_is_the_engine_with_calls_of_width_1() -> None:
    engine = ToyEngine(50)
    one = OneRowEngine(engine)
    one.prefill([1, 2, 3])
    assert np.asarray(one.verify([4])).shape == (1, 50)
    assert (engine.widths_used, one.verify_widths, one.kv_length) == ([8, 1], (1,), 4)
    one.rollback(2)
    assert (one.kv_length, one.vocab_size, one.capacity) == (2, 50, 64)


def test_a_report_also_predicts_by_replay_what_each_setting_gives(bench: Run) -> None:
    rows = bench(predict=True, repeats=1, ks=[3, "auto"], drafters=["ngram"])
    assert all((row.predicted is None) == (row.setting == PLAIN_ONE) for row in rows)
    plain = {row.category: row.predicted for row in rows if row.setting == PLAIN}
    assert all(rate and rate > 0 for rate in plain.values())
    assert all(row.predicted is None for row in bench(repeats=1))


def test_texts_that_depend_on_the_setting_are_not_replayed(bench: Run) -> None:
    options = {"max_tokens": 10, "ignore_eos": True, "temperature": 1.0, "coupling": "rejection"}
    assert {row.predicted for row in bench(options=options, drafters=["model"], predict=True)} == {None}


def test_a_hint_says_why_a_setting_is_slower_than_plain_and_stands_below_the_table() -> None:
    def slow(factor: float) -> Statistics:
        some = Statistics(drafter="model", num_prompt_tokens=1, call_s={2: 0.1, 4: 0.2})
        for _ in range(20):
            some.count(depths=range(3), accepted=0, committed=1)
        some.verify_s, some.rest_s = 20 * 0.2 * factor, 0.001
        return some

    for factor, hinted in ((1.0, True), (0.1, False)):  # measured over plain, an estimate that is wrong counts nothing
        runs = {("all", name): [[timed(2.0, 20)]] for name in (PLAIN_ONE, PLAIN)}
        runs["all", "model k=3"] = [[slow(factor)]]
        rows = [_row("all", setting, runs) for setting in (_Setting(PLAIN_ONE), _Setting("model k=3", "model", 3))]
        assert (rows[1].hint is not None) == hinted
        line = "model k=3: slower than plain decoding: few proposals were accepted"
        assert format_table(rows).splitlines()[-1].startswith(line) == hinted


@pytest.fixture
def trees(trees_artifact: Path, machine_cache: Path) -> Iterator[LanguageModel]:
    with specrt.load(trees_artifact, cache_dir=machine_cache) as model:
        yield model


def bench_trees(model: LanguageModel, **changes: Any) -> list[BenchRow]:
    arguments: dict[str, Any] = {
        "ks": [3], "drafters": ["ngram", "suffix", "eagle"], "repeats": 2, "chat": False, "trees": ["suffix", "eagle"],
        "options": {"max_tokens": 20, "ignore_eos": True}, "on_run": lambda: None,
    }  # fmt: skip
    return run_bench(model, PROMPTS, **{**arguments, **changes})


def test_chains_and_trees_stand_side_by_side(trees: LanguageModel) -> None:
    calls: list[None] = []
    rows = bench_trees(trees, on_run=lambda: calls.append(None), predict=True)
    names = ["ngram k=3", "suffix k=3", "suffix tree k=3", "eagle k=3", "eagle tree k=3"]
    every = [row for row in rows if row.category == "all"]
    assert [(row.setting, row.tree) for row in every[2:]] == [(name, "tree" in name) for name in names]
    assert len(calls) == num_runs(len(PROMPTS), ["ngram", "suffix", "eagle"], [3], 2, ["suffix", "eagle"]) == 3 * 7 * 2
    chain, tree = (row for row in every if row.drafter == "eagle")
    assert (len(chain.acceptance_by_position), chain.num_other_texts) == (3, 0)
    assert len(tree.acceptance_by_position) < 3, "it did not branch"
    assert [row.setting for row in every if row.predicted is None] == [PLAIN_ONE, "eagle k=3", "eagle tree k=3"]


@pytest.mark.parametrize("strict", [False, True])
def test_another_text_is_counted_for_trees_and_an_error_where_they_are_strict(
    trees: LanguageModel, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    model: Any = trees
    start = model.start

    def wrong(prompt: Any, options: Any, **named: Any) -> Any:
        biased = options["tree"] and options["drafter"] == "suffix" and prompt == PROMPTS[1].text
        return start(prompt, {**options, "logit_bias": {60: 30.0}} if biased else options, **named)

    monkeypatch.setattr(model, "start", wrong)
    options = {"max_tokens": 20, "ignore_eos": True, "strict": strict}
    if strict:
        with pytest.raises(SpecRTError, match="suffix tree k=3 gave other tokens than plain on 'the quick brown'"):
            bench_trees(model, options=options)
        return
    rows = bench_trees(model, options=options)
    counts = {(row.category, row.setting): row.num_other_texts for row in rows if row.num_other_texts}
    assert counts == {("chat", "suffix tree k=3"): 1, ("all", "suffix tree k=3"): 1}
    assert "suffix tree k=3: 1 prompts with another text than plain" in format_table(rows)
