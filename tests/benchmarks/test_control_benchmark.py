"""The benchmark of rules for k: one text under all of them, and rules that do what they say."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.control import Ewma, Heuristic, main, measure
from specrt.acceptance import Proposal
from specrt.control import Step
from specrt.errors import SpecRTError
from specrt.language_model import LanguageModel
from specrt.prompts import BenchPrompt

PROMPTS = '{"prompt": "the quick brown fox", "category": "a"}\n{"prompt": "the quick brown", "category": "b"}\n'


def feed(rule: Ewma, *, proposed: int, accepted: int) -> int:
    step = Step(
        proposal=Proposal((1,) * proposed), num_drafted=proposed, num_accepted=accepted, draft_s=1e-4, verify_s=1e-3
    )
    rule.learn(step)
    return rule.limit(15)


def test_the_mean_follows_what_is_accepted() -> None:
    rule = Ewma(first=5)
    assert rule.limit(15) == 6
    down = [feed(rule, proposed=6, accepted=0) for _ in range(40)]
    assert down == sorted(down, reverse=True)
    assert down[-1] == 2  # never none, or it would not come back
    up = [feed(rule, proposed=9, accepted=9) for _ in range(40)]
    assert up == sorted(up)
    assert up[-1] == 10
    assert feed(rule, proposed=0, accepted=0) == 10
    assert rule.limit(4) == 4


def test_the_heuristic_counts_up_by_two_and_down_by_one() -> None:
    rule = Heuristic(first=3)
    assert [feed(rule, proposed=3, accepted=3), feed(rule, proposed=5, accepted=4)] == [5, 4]
    assert [feed(rule, proposed=4, accepted=0) for _ in range(5)] == [3, 2, 1, 1, 1]


def test_a_table_has_every_rule_and_category(tiny_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(PROMPTS, "utf-8")
    words = [tiny_artifact, "--prompts", tmp_path / "prompts.jsonl", "--max-tokens", 20, "--ks", "3,auto"]
    words += ["--drafter", "suffix", "--drafter", "model"]
    result = CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("|")]
    assert lines[0] == "| suffix | plain | k=3 | k=auto | ewma | heuristic |"
    categories = [line.split()[1] for line in lines if not line.startswith("|---")]
    assert categories == ["suffix", "a", "b", "all", "model", "a", "b", "all"]
    assert {line.count("|") for line in lines} == {7}
    assert all(float(cell.split()[1]) > 0 for line in lines if " x " in line for cell in line.split("|")[2:-1])


def test_rules_that_change_the_text_are_found(tiny_model: LanguageModel) -> None:
    rules: dict[str, Any] = {"plain": lambda: {"drafter": "none"}, "biased": lambda: {"logit_bias": {5: 99.0}}}
    with pytest.raises(SpecRTError, match="the rules gave 2 texts for 'the quick brown fox'"):
        measure(tiny_model, [BenchPrompt("a", "the quick brown fox")], rules, max_tokens=5, repeats=1)


def test_a_prompt_that_is_too_long_is_one_line(tiny_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "' + "word " * 2000 + '", "category": "a"}\n', "utf-8")
    result = CliRunner().invoke(main, [str(tiny_artifact), "--prompts", str(tmp_path / "prompts.jsonl")])
    assert result.exit_code == 1
    assert result.output.startswith("Error: prompt 1 of 1 (a): the prompt has")
