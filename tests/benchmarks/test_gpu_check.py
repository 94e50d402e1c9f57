"""`make gpu-check` without a GPU, and what it would notice with one."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
import tiny
from benchmarks import gpu_check
from simulated_cuda import SimulatedDriver
from simulated_gpu import add_gpu
from simulated_trt import plan_artifact
from specrt import engine_trt
from specrt.cuda import Gpu, probe_driver
from specrt.device_rows import DeviceLogits, DeviceRows
from specrt.engine_bound import BoundEngine
from specrt.errors import EngineError
from toy import ToyEngine

ROOT = Path(__file__).parents[2]
PROMPTS = ["the quick brown fox", "def mean(values):", "naïve café"]
NAMES = ["greedy, k=3", "greedy, k=15", "sampled, k=3", "top-p, k=3"]


@pytest.fixture
def plan(tensorrt_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A simulated plan on a machine with a simulated GPU."""
    add_gpu(monkeypatch)
    return plan_artifact(tensorrt_artifact, tmp_path / "plan")


@pytest.fixture(scope="module")
def best_tokens(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the same model that says the best tokens of each row."""
    profile = tiny.profile(dialect="tensorrt", output="top-k")
    return tiny.export_tiny(tiny_source, tmp_path_factory.mktemp("best") / "tiny", profile=profile)


def run(plan: Path, reference: Path, cache_dir: Path) -> dict[str, Any]:
    with specrt.load(reference, cache_dir=cache_dir) as model:
        expected = gpu_check.texts(model, PROMPTS, 0)
    return gpu_check.check_folder(plan, PROMPTS, expected, device="cuda:0", cache_dir=cache_dir, repeats=3)


@pytest.mark.parametrize("arguments", [["--probe"], [], ["reference", "artifact"]])
def test_without_a_gpu_nothing_is_claimed(arguments: list[str], tmp_path: Path) -> None:
    try:
        probe_driver()
    except EngineError:
        words = [sys.executable, "-m", "benchmarks.gpu_check", *arguments, "--out", str(tmp_path / "out.json")]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.startswith("gpu-check: no CUDA driver here (libcuda.so.1: ")
        assert done.stdout.endswith("; nothing was run, and nothing is claimed\n")
        assert (done.returncode, done.stderr) == (3 if arguments == ["--probe"] else 0, "")
        assert list(tmp_path.iterdir()) == []
    else:
        pytest.skip("there is a driver")


def test_what_is_right_is_reported_as_right(plan: Path, tensorrt_artifact: Path, tmp_path: Path) -> None:
    report = run(plan, tensorrt_artifact, tmp_path / "cache")
    assert report["problems"] == []
    assert (report["num_texts"], report["as_on_cpu"]) == (3, 3)
    assert report["speculative_as_plain"] == dict.fromkeys(NAMES, 3)
    assert (report["dialect"], report["output"], report["as_whole_rows"]) == ("tensorrt", "logits", {})
    assert list(report["same_bits"]) == [(2, 4, 6, 10, 16)]
    assert list(report["calls"]) == ["decode", "2", "4", "6", "10", "16"]
    assert all(call["median_s"] > 0 for call in report["calls"].values())
    assert "Simulated GPU" in report["platform"]
    json.dumps(report)


def test_logits_that_stay_on_the_gpu_are_compared_with_whole_rows(
    best_tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = add_gpu(monkeypatch)
    plan, cache = plan_artifact(best_tokens, tmp_path / "plan"), tmp_path / "cache"
    report = run(plan, best_tokens, cache)
    assert report["problems"] == []
    assert (report["output"], report["as_on_cpu"]) == ("top-k", 3)
    assert report["speculative_as_plain"] == dict.fromkeys(NAMES, 3)
    assert report["as_whole_rows"] == {"greedy": 3, "sampled": 3, "top-p": 3}
    json.dumps(report)
    with specrt.load(plan, cache_dir=cache) as model:
        rows = {}
        for name, sampling in gpu_check._SAMPLING.items():
            for whole, params in ((False, sampling), (True, gpu_check.whole_rows(sampling))):
                driver.copies.clear()
                made = sum(map(len, gpu_check.texts(model, PROMPTS, 0, params)))
                rows[name, whole] = driver.copies.count(("down", 4 * tiny.VOCAB_SIZE)) / made
    assert all(rows[name, True] == 1 for name in gpu_check._SAMPLING)
    assert rows["greedy", False] == rows["sampled", False] == 0
    assert rows["top-p", False] < 1


@pytest.mark.parametrize("what", ["best_ids", "top"])
def test_best_tokens_that_are_not_the_rows_are_seen(
    best_tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Once an artifact was loaded, only this and `specrt check` look again."""
    add_gpu(monkeypatch)
    plan, cache = plan_artifact(best_tokens, tmp_path / "plan"), tmp_path / "cache"
    specrt.load(plan, cache_dir=cache).close()
    original = DeviceLogits.rows

    def others(logits: DeviceLogits, count: int) -> Any:
        rows: Any = original(logits, count)
        ids = [token ^ (what == "best_ids") for token in rows.best_ids]
        top = (rows.top[0] ^ (what == "top"), *rows.top[1:])
        return DeviceRows(logits, ids, rows.best_logits, top)

    monkeypatch.setattr(DeviceLogits, "rows", others)
    monkeypatch.setattr(gpu_check, "mean_kl", lambda *_: 0.0)  # which would refuse it
    report = run(plan, best_tokens, cache)
    which = "greedy" if what == "best_ids" else "sampled"
    assert report["as_whole_rows"][which] < 3
    assert f"{which}: {report['as_whole_rows'][which]} of 3 texts as whole rows" in report["problems"]


class StainedEngine(ToyEngine):
    """Its logits tell how often it was rolled back."""

    num_rollbacks = 0

    def rollback(self, length: int) -> None:
        super().rollback(length)
        self.num_rollbacks += 1

    def verify(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> Any:
        return super().verify(token_ids, parents) + (self.num_rollbacks % 7 == 0)


def test_a_rollback_that_leaves_a_trace_is_seen() -> None:
    tokens = [number % 5 for number in range(64)]
    assert gpu_check.rollback_traces(ToyEngine(), tokens) == []
    assert gpu_check.rollback_traces(StainedEngine(), tokens) == [2, 4, 6, 10, 16]


def test_texts_that_differ_are_counted(
    plan: Path, tensorrt_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(plan, tensorrt_artifact, tmp_path / "cache")
    original = BoundEngine.verify

    def worse(engine: BoundEngine, token_ids: Any, parents: Any = None) -> Any:
        rows = original(engine, token_ids, parents)
        return np.roll(rows, len(token_ids) // 3, axis=1) if engine.platform.startswith("tensorrt") else rows

    monkeypatch.setattr(BoundEngine, "verify", worse)
    report = run(plan, tensorrt_artifact, tmp_path / "cache")
    assert [problem for problem in report["problems"] if "texts speculative as plain" in problem]
    assert [problem for problem in report["problems"] if problem.startswith("mean KL")]


def test_what_cannot_be_opened_is_a_problem_and_what_is_not_installed_is_not_run(
    plan: Path, tensorrt_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = gpu_check.check_folder(tmp_path / "nothing", PROMPTS, [], device="cuda:0", cache_dir=tmp_path)
    assert "no manifest.json there" in report["problems"][0]
    monkeypatch.undo()
    monkeypatch.setattr(engine_trt, "open_gpu", lambda index, extra: Gpu(SimulatedDriver(), index))
    for name in ("tensorrt_rtx", "tensorrt"):
        monkeypatch.setitem(sys.modules, name, None)
    report = gpu_check.check_folder(plan, PROMPTS, [], device="cuda:0", cache_dir=tmp_path)
    assert report["not_run"].startswith("tensorrt_rtx not installed: run")
    assert "problems" not in report
