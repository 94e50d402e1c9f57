"""The benchmark of the suffix drafter: real and replayed runs agree on everything but seconds."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.suffix import main, make_text

PROMPTS = '{"prompt": "the quick brown fox", "category": "a"}\n{"prompt": "the quick brown", "category": "b"}\n'


def lines(*words: object) -> list[str]:
    result = CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_costs_has_a_line_per_length_and_drafter() -> None:
    found = lines("costs", "--lengths", "100,300")
    names = ["ngram", "suffix", "suffix, cache"]
    assert [line[:14].strip() for line in found[1:]] == names * 2
    assert [line[14:23].strip() for line in found[1:]] == ["100"] * 3 + ["300"] * 3


def test_the_text_has_passages_that_occurred_before() -> None:
    text = make_text(2000)
    assert len(text) == 2000
    runs = [tuple(text[start : start + 6]) for start in range(1994)]
    assert len(set(runs)) < 0.9 * len(runs)
    assert make_text(500, seed=1) != make_text(500)


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_replay_counts_what_a_real_run_counts(tiny_artifact: Path, tmp_path: Path, repeats: int) -> None:
    (tmp_path / "prompts.jsonl").write_text(PROMPTS, "utf-8")
    words = ["run", tiny_artifact, "--prompts", tmp_path / "prompts.jsonl", "--max-tokens", 30, "-k", 15]
    words += ["--repeats", repeats]
    real = lines(*words)
    replayed = lines(*words, "--call-ms", "1,1,1,1,1")
    assert [line.split()[-1] for line in real] == [line.split()[-1] for line in replayed]
    settings = [(line[:18].strip(), line[19:33].strip()) for line in replayed]
    assert settings == [(c, s) for c in ("a", "b", "all") for s in ("ngram", "suffix", "suffix, cache")]
    for line in replayed:  # a call takes a millisecond: a thousand times the block efficiency
        tokens_per_s, efficiency = float(line[33:].split()[0]), float(line.split()[-1])
        assert tokens_per_s == pytest.approx(1000 * efficiency, abs=6)
