"""Metrics: one report per request however it ends, sums that agree with the statistics, the documented names."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specrt
from specrt import LanguageModel, Statistics
from specrt.errors import MissingExtraError
from specrt.metrics import Metrics
from specrt_profiles import extras

PROMPT = "def mean(values):"
DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")
LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


class Reports:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[Statistics, str]] = []

    def observe(self, stats: Statistics, outcome: Any) -> None:
        self.seen.append((stats, outcome))


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def model(tiny_artifact: Path, machine_cache: Path, reports: Reports) -> Iterator[LanguageModel]:
    with specrt.load(tiny_artifact, cache_dir=machine_cache, metrics=reports) as model:
        yield model


@pytest.fixture
def metrics() -> Metrics:
    pytest.importorskip("prometheus_client")
    return Metrics()


def fail(model: LanguageModel) -> None:
    target: Any = model.target
    verify, target.verify = target.verify, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model.generate(PROMPT)
    target.verify = verify


def interrupt(model: LanguageModel) -> None:
    def verify(*_: Any) -> Any:
        raise KeyboardInterrupt

    target: Any = model.target
    healthy, target.verify = target.verify, verify
    with pytest.raises(KeyboardInterrupt):
        model.generate(PROMPT)
    target.verify = healthy


def close_early(model: LanguageModel) -> None:
    stream = model.stream(PROMPT, **LONG)
    next(stream)
    for _ in range(3):
        stream.close()


ENDINGS: dict[str, tuple[Any, str, bool]] = {  # what ends it, the outcome, whether tokens were generated
    "length": (lambda model: model.generate(PROMPT, **LONG), "length", True),
    "stop": (lambda model: model.generate(PROMPT, logit_bias={0: 50.0}), "stop", True),
    "capacity": (lambda model: model.generate([5] * 120, ignore_eos=True), "capacity", True),
    "nothing to do": (lambda model: model.generate(PROMPT, max_tokens=0), "length", False),
    "closed early": (close_early, "cancelled", True),
    "never begun": (lambda model: model.stream(PROMPT).close(), "cancelled", False),
    "an error": (fail, "error", False),
    "an interrupt": (interrupt, "cancelled", False),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_request_is_reported_once_however_it_ends(model: LanguageModel, reports: Reports, ending: str) -> None:
    act, outcome, generated = ENDINGS[ending]
    act(model)
    ((stats, found),) = reports.seen
    assert (found, stats.num_tokens > 0) == (outcome, generated)
    model.generate(PROMPT, max_tokens=1)
    assert len(reports.seen) == 2


def test_a_refused_request_is_none(model: LanguageModel, reports: Reports) -> None:
    with pytest.raises(specrt.RequestError):
        model.generate(PROMPT, k=99)
    assert reports.seen == []


def test_what_is_reported_is_final(model: LanguageModel, reports: Reports) -> None:
    result = model.generate(PROMPT, **LONG)
    ((stats, _),) = reports.seen
    assert stats.to_dict() == result.stats.to_dict()


def test_an_observer_that_fails_costs_nothing(
    tiny_artifact: Path, machine_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def observe(self, stats: Statistics, outcome: Any) -> None:
            raise IndexError("full")

    with (
        specrt.load(tiny_artifact, cache_dir=machine_cache, metrics=Failing()) as model,
        caplog.at_level(logging.ERROR),
    ):
        for _ in range(2):
            assert len(model.generate(PROMPT, max_tokens=3).token_ids) == 3
    assert caplog.text.count("IndexError: full") == 2


def test_an_interrupt_in_an_observer_frees_the_model(tiny_artifact: Path, machine_cache: Path) -> None:
    class Interrupted:
        def observe(self, stats: Statistics, outcome: Any) -> None:
            raise KeyboardInterrupt

    with specrt.load(tiny_artifact, cache_dir=machine_cache, metrics=Interrupted()) as model:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                model.generate(PROMPT, max_tokens=3)


def values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return samples by name and label values."""
    found = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found[sample.name.removeprefix("specrt_"), *sample.labels.values()] = sample.value
    return found


def run_requests(model: LanguageModel) -> None:
    """Run requests of all kinds with every drafter; some end inside a proposal, one reuses its prompt."""
    plain = model.generate(PROMPT, k=0, **LONG)
    for drafter in ("none", "ngram", "model", "combined"):
        for k in (1, 3, 8, 15):
            model.generate(PROMPT, drafter=drafter, k=k, **LONG)
            model.generate(PROMPT, drafter=drafter, k=k, stop_token_ids=[plain.token_ids[11]], **LONG)
            model.generate(PROMPT, drafter=drafter, k=k, temperature=0.7, seed=k, coupling="rejection", **LONG)
    model.generate(PROMPT, drafter="model", max_tokens=0)


def test_sums_are_those_of_the_requests(model: LanguageModel, reports: Reports, metrics: Metrics) -> None:
    run_requests(model)
    for stats, outcome in reports.seen:
        metrics.observe(stats, outcome)
    found = values(metrics)
    for drafter in ("none", "ngram", "model", "combined"):
        requests = [stats for stats, _ in reports.seen if stats.drafter == drafter]
        for name, field in {
            "spec_decode_num_drafts": "num_drafts", "spec_decode_num_draft_tokens": "num_proposed",
            "spec_decode_num_accepted_tokens": "num_accepted", "verify_calls": "num_calls",
            "generation_tokens": "num_tokens", "prompt_tokens": "num_prompt_tokens",
            "prefix_cache_hits": "num_cached_tokens", "drafter_faults": "num_drafter_faults",
            "prefill_seconds": "prefill_s", "draft_seconds": "draft_s", "verify_seconds": "verify_s",
            "rest_seconds": "rest_s",
        }.items():  # fmt: skip
            assert found[f"{name}_total", drafter] == pytest.approx(sum(getattr(stats, field) for stats in requests))
        for part in {name for stats in requests for name in stats.parts}:
            assert drafter == "combined"
            for name, field in {
                "num_drafts": "num_drafts", "num_draft_tokens": "num_proposed", "num_accepted_tokens": "num_accepted",
            }.items():  # fmt: skip
                counted = found[f"spec_decode_part_{name}_total", drafter, part]
                assert counted == sum(getattr(stats.parts[part], field) for stats in requests if part in stats.parts)
        assert found["request_generation_tokens_count", drafter] == len(requests)
        assert found["time_to_first_token_seconds_count", drafter] == sum(stats.num_tokens > 0 for stats in requests)
        assert found["prefix_cache_hit_requests_total", drafter] == sum(s.num_cached_tokens > 0 for s in requests)
    outcomes = [outcome for _, outcome in reports.seen]
    for outcome in ("length", "stop"):
        total = sum(value for key, value in found.items() if key[0] == "requests_total" and key[2] == outcome)
        assert total == outcomes.count(outcome) > 0


def test_counters_are_consistent_for_every_drafter(model: LanguageModel, reports: Reports, metrics: Metrics) -> None:
    run_requests(model)
    for stats, outcome in reports.seen:
        metrics.observe(stats, outcome)
    found = values(metrics)
    for drafter in ("none", "ngram", "model", "combined"):
        accepted = found["spec_decode_num_accepted_tokens_total", drafter]
        drafts, calls = found["spec_decode_num_drafts_total", drafter], found["verify_calls_total", drafter]
        by_position = [
            found["spec_decode_num_accepted_tokens_per_pos_total", drafter, str(position)]
            for position in range(16)
            if ("spec_decode_num_accepted_tokens_per_pos_total", drafter, str(position)) in found
        ]
        assert accepted <= found["spec_decode_num_draft_tokens_total", drafter]
        assert sum(by_position) == accepted
        assert by_position == sorted(by_position, reverse=True)
        assert by_position[:1] <= [drafts]
        assert drafts <= calls
        generated = found["generation_tokens_total", drafter]
        assert calls <= generated <= accepted + calls
        assert found["prefix_cache_hits_total", drafter] <= found["prefix_cache_queries_total", drafter]
        assert (accepted > 0) == (drafts > 0) == (drafter != "none")


def test_the_document_lists_every_metric_and_no_other(metrics: Metrics) -> None:
    exposed = {family.name for family in metrics.registry.collect()}
    assert set(re.findall(r"^\| `(specrt_\w+)` \|", DOCUMENT, re.MULTILINE)) == exposed


def test_the_documents_example_runs(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("prometheus_client")
    (example,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "smollm2").symlink_to(tiny_artifact)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    exec(compile(example, "metrics.md", "exec"), {})
    assert re.search(r'^specrt_requests_total\{drafter="\w+",finish_reason="\w+"\} 1.0$', capsys.readouterr().out, re.M)


def test_a_registry_can_be_shared_and_two_of_its_own_do_not_meet(metrics: Metrics) -> None:
    from prometheus_client import CollectorRegistry

    stats = Statistics(drafter="ngram", num_prompt_tokens=3)
    shared = CollectorRegistry()
    Metrics(shared).observe(stats, "stop")
    assert shared.get_sample_value("specrt_prompt_tokens_total", {"drafter": "ngram"}) == 3
    assert "ngram" not in metrics.text()
    with pytest.raises(ValueError, match="Duplicated"):
        Metrics(shared)


def test_without_the_extra_the_line_that_installs_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"prometheus_client not installed: run  pip install 'specrt\[metrics\]'"
    ):
        Metrics()
