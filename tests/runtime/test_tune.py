"""`specrt tune`: what is chosen is the fastest that was measured, and holds on this machine until forgotten."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import specrt
from specrt import tune
from specrt.cli import main
from specrt.errors import RequestError, SpecRTError
from specrt.machine import Choice
from specrt.prompts import BenchPrompt
from specrt.speculation import resolve_speculation
from specrt.tune import PLAIN, Setting, format_report, num_runs, run_tune

PROMPTS = [BenchPrompt("a", "one two one two one two"), BenchPrompt("b", "three")]


@pytest.fixture
def report(tiny_model: specrt.LanguageModel) -> tune.TuneReport:
    return tuned(tiny_model)


def tuned(model: specrt.LanguageModel, **options: Any) -> tune.TuneReport:
    runs: list[int] = []
    report = run_tune(
        model, PROMPTS, drafters=("ngram", "model"), repeats=1, chat=False, on_run=lambda: runs.append(1),
        options={"max_tokens": 12, "temperature": 0.0, **options},  # type: ignore[typeddict-item]
    )  # fmt: skip
    assert 0 < len(runs) <= num_runs(len(PROMPTS), 2, len(model.target.verify_widths), 1)
    return report


def test_every_drafter_is_tried_at_every_k_and_the_best_few_run_for_real(report: tune.TuneReport) -> None:
    ks = [1, 3, 5, 9, 15, "auto"]
    assert {row.setting for row in report.rows} == {
        PLAIN, *(Setting(drafter=name, k=k) for name in ("ngram", "model") for k in ks)  # type: ignore[arg-type]
    }  # fmt: skip
    measured = {row.setting: row.measured for row in report.rows if row.measured is not None}
    assert len(measured) == tune.CONFIRMED + 1
    assert PLAIN in measured
    assert report.choice == max(measured, key=lambda setting: measured[setting])
    predicted = sorted((row.predicted or 0.0 for row in report.rows if row.setting != PLAIN), reverse=True)
    assert {r.predicted for r in report.rows if r.measured and r.setting != PLAIN} == set(predicted[: tune.CONFIRMED])
    assert set(report.call_s) == {2, 4, 6, 10, 16}
    assert all(0 <= share <= 1 for shares in report.acceptance.values() for share in shares)
    assert next(row for row in report.rows if row.setting == PLAIN).speedup == 1


def test_drafters_that_cannot_be_replayed_run_for_real(trees_artifact: Path, tmp_path: Path) -> None:
    runs: list[int] = []
    with specrt.load(trees_artifact, cache_dir=tmp_path) as model:
        found = run_tune(
            model, PROMPTS, drafters=("ngram", "eagle", "combined"), repeats=2, chat=False,
            options={"max_tokens": 12, "temperature": 0.0}, on_run=lambda: runs.append(1),
        )  # fmt: skip
        assert len(runs) == num_runs(len(PROMPTS), 1, len(model.target.verify_widths), 2, 2)
    rows = {row.setting: row for row in found.rows}
    for name in ("eagle", "combined"):
        row = rows[Setting(drafter=name, k="auto")]
        assert (row.predicted, row.by_category) == (None, {})
        assert row.measured is not None
        assert row.tokens_per_step >= 1
        assert sum(setting.drafter == name for setting in rows) == 1
    assert found.choice == max(rows.values(), key=lambda row: row.measured or 0).setting
    assert re.search(r"^eagle k=auto +- ", format_report(found), re.MULTILINE)


def test_trees_are_tried_where_the_artifact_takes_them(
    trees_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    started: list[Any] = []
    start = specrt.LanguageModel.start
    monkeypatch.setattr(
        specrt.LanguageModel, "start",
        lambda self, prompt, options, **named: started.append(options) or start(self, prompt, options, **named),
    )  # fmt: skip
    with specrt.load(trees_artifact, cache_dir=tmp_path) as model:
        found = run_tune(
            model, PROMPTS, drafters=("ngram", "suffix", "eagle"), trees=("suffix", "eagle"), repeats=1, chat=False,
            options={"max_tokens": 12, "temperature": 0.0}, on_run=lambda: runs.append(1),
        )  # fmt: skip
        assert 0 < len(runs) <= num_runs(len(PROMPTS), 3, len(model.target.verify_widths), 1, 2)
    settings = {row.setting for row in found.rows}
    branching = {setting for setting in settings if setting.tree}
    ks = (1, 3, 5, 9, 15, "auto")
    assert branching == {
        *(Setting(drafter="suffix", k=k, tree=True) for k in ks),  # type: ignore[arg-type]
        Setting(drafter="eagle", k="auto", tree=True),
    }  # fmt: skip
    assert {replace(setting, tree=False) for setting in branching} < settings
    assert all(row.formula is None for row in found.rows if row.setting.tree)
    assert all(options["strict"] for options in started if options.get("tree"))
    assert sum(bool(options.get("tree")) for options in started) >= 2 * 7
    assert "suffix k=9 tree " in format_report(found)


def test_a_tree_that_was_chosen_keeps_the_bits_of_a_text(trees_artifact: Path, tmp_path: Path) -> None:
    with specrt.load(trees_artifact, cache_dir=tmp_path) as model:
        model.machine.choose(Choice(drafter="suffix", k=9, tree=True))
    with specrt.load(trees_artifact, cache_dir=tmp_path) as model:
        assert model.choice == Choice(drafter="suffix", k=9, tree=True)
        resolve = partial(
            resolve_speculation, drafters={"suffix": 15, "eagle": 5}, default="eagle", choice=model.choice, max_k=15,
            trees=("suffix", "eagle"),
        )  # fmt: skip
        for given, wanted in (
            ({}, ("suffix", 9, True, True)),
            ({"k": 3}, ("suffix", 3, True, True)),
            ({"tree": False}, ("suffix", 9, False, True)),
            ({"strict": False}, ("suffix", 9, True, False)),
            ({"drafter": "eagle"}, ("eagle", 5, False, False)),
        ):
            how = resolve(given)
            assert (how.drafter, how.k, how.tree, how.strict) == wanted
        options: Any = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1}
        plain, chosen = model.generate("one two one", k=0, **options), model.generate("one two one", **options)
        assert chosen.stats.drafter == "suffix"
        assert (chosen.token_ids, chosen.logprobs) == (plain.token_ids, plain.logprobs)


def test_steps_that_take_too_long_are_not_chosen(tiny_model: specrt.LanguageModel) -> None:
    report = tuned(tiny_model, max_step_ms=1e-6)
    assert report.choice == PLAIN or report.choice.k == "auto"  # an adaptive k takes no guess then
    assert len(report.too_slow) == 10
    assert {row.tokens_per_step for row in report.rows} == {1.0}
    assert "steps longer than 1e-06 ms: ngram k=1, " in format_report(report)


def test_the_page_says_what_is_best(report: tune.TuneReport) -> None:
    page = format_report(report)
    assert page.endswith("plain decoding")
    plain = format_report(tune.replace(report, choice=PLAIN))
    assert "no speculation is best here" in plain


def test_a_text_that_changes_is_an_error(tiny_model: specrt.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_replay", lambda model, text, *_: tune._run(model, text, PLAIN, {"max_tokens": 3}))
    with pytest.raises(SpecRTError, match="plain gave other tokens than plain decoding: run 'specrt check'"):
        tuned(tiny_model)


def test_a_choice_is_the_default_until_a_request_names_a_drafter(tiny_artifact: Path, tmp_path: Path) -> None:
    def stats(**options: Any) -> Any:
        with specrt.load(tiny_artifact, cache_dir=tmp_path) as model:
            return model.generate("one two one two one two", max_tokens=12, temperature=0.0, **options).stats

    assert stats().drafter == "model"
    with specrt.load(tiny_artifact, cache_dir=tmp_path) as model:
        model.machine.choose(Choice(drafter="ngram", k=1))
    assert stats().drafter == "ngram"
    assert len(stats().proposed_by_position) <= 1
    assert stats(drafter="model").drafter == "model"
    assert len(stats(k=3).proposed_by_position) <= 3
    with specrt.load(tiny_artifact, cache_dir=tmp_path) as model:
        model.machine.choose(Choice(drafter="none", k=0))
    assert stats().num_proposed == 0


def test_the_command_keeps_its_choice_and_forgets_it(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one two one two"}')
    call = [
        "tune",
        str(tiny_artifact),
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--max-tokens",
        "6",
        "--repeats",
        "1",
    ]

    def choice() -> Choice | None:
        with specrt.load(tiny_artifact) as model:
            return model.choice

    dry = CliRunner().invoke(main, [*call, "--dry-run", "--json", "--drafter", "ngram"])
    assert dry.exit_code == 0, dry.output
    assert json.loads(dry.stdout)["choice"]["drafter"] in ("ngram", "none")
    assert choice() is None
    kept = CliRunner().invoke(main, [*call, "--plot", str(tmp_path / "plot.svg")])
    assert kept.exit_code == 0, kept.output
    assert "kept in" in kept.stdout
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
    assert choice() is not None
    assert CliRunner().invoke(main, ["tune", str(tiny_artifact), "--forget"]).exit_code == 0
    assert choice() is None


@pytest.mark.parametrize("options", [{"k": 3, "max_step_ms": 5}, {"max_step_ms": 0}, {"max_step_ms": -1}])
def test_a_time_limit_goes_with_adaptive_k_only(tiny_model: specrt.LanguageModel, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="max_step_ms: expected a number above 0, with k 'auto'"):
        tiny_model.generate("one", **options)
