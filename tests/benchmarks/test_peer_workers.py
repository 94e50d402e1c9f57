"""SpecRT's own runner, by itself and behind the worker's pipes; options of the driver."""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest

import specrt
from benchmarks.peers.__main__ import _choice, _reference
from benchmarks.peers.client import Worker, WorkerError, cpu_seconds
from benchmarks.peers.environments import python_of
from benchmarks.peers.measure import Bench, PromptIds
from benchmarks.peers.protocol import Job, Model
from benchmarks.peers.registry import PEERS, PeerEntry
from benchmarks.peers.results import Lane, LaneFacts, Setting
from benchmarks.peers.specrt_runner import Runner

IDS = [5, 9, 5, 9, 5]
LANE = Lane("specrt", "fp32")
MORE = [Setting("plain-1", 0), Setting("auto", 0)]
SETTINGS = [Setting("plain", 0), Setting("ngram", 3), Setting("draft", 3)]
OPTIONS = {
    "only": (), "artifact": (), "prompts": None, "per_category": 1, "max_tokens": 32, "ks": "5,3", "threads": 2,
    "draft": None, "model": "m", "repeats": 1, "capacity": 64, "work": Path("w"), "envs": Path("e"),
}  # fmt: skip


@pytest.fixture
def job(tiny_artifact: Path) -> Job:
    model = Model(source=tiny_artifact, gguf=tiny_artifact, folder=tiny_artifact)
    return Job(variant="fp32", target=model, draft=None, mode=None, threads=1, context=64)


@pytest.fixture
def bench(job: Job, tmp_path: Path) -> Iterator[tuple[Bench, dict[Lane, LaneFacts]]]:
    facts = {LANE: LaneFacts()}
    opened = Bench(facts, SETTINGS, tmp_path)
    opened.open(LANE, Path(sys.executable), lambda _: job)
    yield opened, facts
    opened.close()


def test_the_runner_gives_what_specrt_gives(job: Job, tiny_model: specrt.LanguageModel) -> None:
    runner = Runner(job)
    runner.prepare()
    runner.open()
    expected = list(tiny_model.generate(IDS, max_tokens=12, ignore_eos=True, temperature=0.0).token_ids)
    for setting in (*MORE, *SETTINGS):
        made = runner.generate(IDS, 12, setting.mode, setting.k)
        assert made.ids == expected, setting
        assert made.num_timed == 12
        assert made.decode_s > 0
        assert made.prompt_s > 0
    rows = runner.logits(expected)
    assert np.array_equal(rows, tiny_model.target.forward(expected, 0, 16))
    assert runner.size() > 1000


def test_the_bench_runs_every_setting_in_turned_order_at_odd_repeats(
    bench: tuple[Bench, dict[Lane, LaneFacts]],
) -> None:
    opened, facts = bench
    seen: list[int] = []
    prompts = [PromptIds("chat", IDS), PromptIds("math", IDS[1:])]
    opened.warm_up(prompts[0])
    runs = opened.run(prompts, n=8, repeats=2, on_run=lambda: seen.append(1))
    assert [run.setting for run in runs] == 2 * [*MORE, *SETTINGS, *SETTINGS[::-1], *MORE[::-1]]
    assert [(run.prompt, run.category) for run in runs] == 10 * [(0, "chat")] + 10 * [(1, "math")]
    assert len(seen) == 20
    assert {len(run.ids) for run in runs} == {8}
    assert facts[LANE].notes == []


def test_a_setting_that_fails_is_left_out_with_a_note(bench: tuple[Bench, dict[Lane, LaneFacts]]) -> None:
    opened, facts = bench
    prompts = [PromptIds("chat", IDS), PromptIds("chat", [10**6])]
    runs = opened.run(prompts, n=8, repeats=2, on_run=lambda: None)
    assert runs == []
    assert opened.num_settings == 0
    assert len(facts[LANE].notes) == len(MORE) + len(SETTINGS)
    assert all(str(setting) in note for setting, note in zip([*MORE, *SETTINGS], facts[LANE].notes, strict=True))


def test_the_bench_judges_the_plain_worker(
    bench: tuple[Bench, dict[Lane, LaneFacts]], tiny_model: specrt.LanguageModel, tmp_path: Path
) -> None:
    opened, facts = bench
    source = tiny_model.target.forward(IDS, 0, 16).copy()
    opened.judge([IDS], [source], tmp_path / "logits.npy")
    assert facts[LANE].kl == pytest.approx(0.0, abs=1e-6)
    assert facts[LANE].num_bytes == sum(p.stat().st_size for p in tiny_model.folder.glob("target.onnx*"))


def test_a_waiting_worker_uses_no_processor_time(job: Job, tmp_path: Path) -> None:
    worker = Worker(Path(sys.executable), "specrt_runner", job, tmp_path / "log")
    try:
        worker.ask("open")
        worker.ask("generate", ids=IDS, n=8, mode="plain", k=0)
        time.sleep(0.1)
        before = cpu_seconds([worker.pid])
        time.sleep(0.5)
        after = cpu_seconds([worker.pid])
    finally:
        worker.close()
    if before is not None and after is not None:
        assert after - before <= 0.02


def test_a_worker_that_dies_says_where_its_log_is(job: Job, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"No module named 'benchmarks.peers.missing'"):
        Worker(Path(sys.executable), "missing", job, tmp_path / "log")
    with pytest.raises(WorkerError, match=r"ended with status \d+ \(log: .*log\)"):
        Worker(Path("/bin/false"), "missing", job, tmp_path / "log")


def test_a_peer_that_cannot_be_installed_is_skipped_with_the_reason(tmp_path: Path) -> None:
    entry = PeerEntry(name="none", module="none", requirements=("./no-such-folder",), variants=())
    said: list[str] = []
    reason = python_of(entry, tmp_path, said.append)
    assert isinstance(reason, str)
    assert reason.startswith("cannot be installed: ERROR: ")
    assert said
    assert python_of(PEERS["specrt"], tmp_path, said.append) == Path(sys.executable)


def test_options_choose_lanes_settings_and_prompts() -> None:
    choice = _choice(**{**OPTIONS, "only": ("hf", "specrt:int8"), "artifact": ("int8=a/b",)})
    assert [str(lane) for lane in choice.lanes] == ["specrt int8", "hf fp32"]
    assert [str(setting) for setting in choice.settings] == ["plain", "ngram k=3", "ngram k=5"]
    assert choice.artifacts == {"int8": Path("a/b")}
    categories = [prompt.category for prompt in choice.prompts]
    assert len(categories) == len(set(categories)) > 1
    drafted = _choice(**{**OPTIONS, "draft": "d"})
    assert [str(setting) for setting in drafted.settings][-2:] == ["draft k=3", "draft k=5"]


@pytest.mark.parametrize(
    "wrong", [{"only": ("hf:int8",)}, {"ks": "three"}, {"ks": "0"}, {"artifact": ("a/b",)}, {"artifact": ("int9=a",)}]
)
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(click.UsageError):
        _choice(**{**OPTIONS, **wrong})


def test_tokens_are_compared_with_transformers_where_it_ran(bench: tuple[Bench, dict[Lane, LaneFacts]]) -> None:
    runs = bench[0].run([PromptIds("chat", IDS)], n=8, repeats=1, on_run=lambda: None)
    runs = [replace(run, ids=(number,)) for number, run in enumerate(runs)]
    assert _reference(runs) == ("specrt fp32 plain", {0: (len(MORE),)})
    other = replace(runs[len(MORE)], lane=Lane("hf", "fp32"), ids=(7,))
    assert _reference([*runs, other]) == ("hf fp32 plain", {0: (7,)})
