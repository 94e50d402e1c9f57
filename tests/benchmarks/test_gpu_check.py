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
from benchmarks import gpu_check
from simulated_cuda import SimulatedDriver
from simulated_trt import SimulatedTensorrt, plan_artifact
from specrt import engine_trt
from specrt.cuda import Gpu, probe_driver
from specrt.engine_bound import BoundEngine
from specrt.errors import EngineError
from toy import ToyEngine

ROOT = Path(__file__).parents[2]
PROMPTS = ["the quick brown fox", "def mean(values):", "naïve café"]


@pytest.fixture
def plan(tensorrt_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A simulated plan on a machine with a simulated GPU."""
    driver = SimulatedDriver()
    trt = SimulatedTensorrt(driver)
    monkeypatch.setattr(engine_trt, "open_gpu", lambda index, extra: Gpu(driver, index))
    monkeypatch.setattr(engine_trt, "import_tensorrt", lambda plan: trt)
    return plan_artifact(tensorrt_artifact, tmp_path / "plan")


def run(plan: Path, reference: Path, cache_dir: Path) -> dict[str, Any]:
    with specrt.load(reference, cache_dir=cache_dir) as model:
        expected = gpu_check.greedy(model, PROMPTS, 0)
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
    assert report["speculative_as_plain"] == {"k=3": 3, "k=15": 3}
    assert list(report["same_bits"]) == [(2, 4, 6, 10, 16)]
    assert list(report["calls"]) == ["decode", "2", "4", "6", "10", "16"]
    assert all(call["median_s"] > 0 for call in report["calls"].values())
    assert "Simulated GPU" in report["platform"]
    json.dumps(report)


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
    assert [problem for problem in report["problems"] if "texts as plain" in problem]
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
