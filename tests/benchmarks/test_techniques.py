"""The table of techniques on small artifacts: what it says is what was measured, and comes from the manifests."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.techniques import Round, line, main
from specrt_profiles.manifest import read_manifest


def test_lines_have_medians_and_what_the_manifest_says(tiny_artifact: Path) -> None:
    rounds = [Round({"plain-1": a, "plain": 80.0, "suffix": b}, 200.0) for a, b in ((90, 150), (100, 260), (130, 200))]
    cells = [cell.strip() for cell in line(tiny_artifact, rounds).split("|")][1:-1]
    parity = read_manifest(tiny_artifact).target.parity
    assert cells[0] == tiny_artifact.name
    assert cells[3:8] == ["200 MiB", "100", "80", "suffix 200 (2.00 x)", "55%"]
    assert cells[8:] == [f"{parity.mean_kl:.2g}", f"{parity.perplexity:.2f}"]


def test_it_runs(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "rounds.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"category": "all", "prompt": "the quick brown"}\n', "utf-8")
    words = [str(tiny_artifact), "--rounds", "2", "--max-tokens", "4", "--drafter", "ngram", "--json", str(path)]
    words += ["--prompts", str(prompts)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith(f"| {tiny_artifact.name} | 0 MiB | 0 MiB |")
    (rounds,) = json.loads(path.read_text("utf-8")).values()
    assert len(rounds) == 2
    for entry in rounds:
        assert entry["tokens_per_s"].keys() == {"plain-1", "plain", "ngram"}
        assert 30 < entry["mib"] < 300


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {tmp_path}: no manifest.json there")
