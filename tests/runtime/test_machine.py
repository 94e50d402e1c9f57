"""What is measured about a machine is measured once; a cache that fails costs a new measurement, nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from specrt import machine
from specrt.errors import RequestError
from specrt.machine import Choice, MachineFacts, MachineFile, processor


class Measure:
    """Counts how often it is asked."""

    def __init__(self, widths: tuple[int, ...] = (2, 4)) -> None:
        self.widths, self.calls = widths, 0

    def __call__(self) -> MachineFacts:
        self.calls += 1
        return MachineFacts(self.widths, {width: width / 1000 for width in self.widths})


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A folder with a manifest; nothing else of an artifact is looked at."""
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    return folder


def remember(artifact: Path, cache: Path, measure: Measure, **key: Any) -> tuple[int, ...]:
    known = {"engine": "engine 1", "threads": 2, **key}
    facts = MachineFile(artifact, cache_dir=cache, **known).facts(measure)
    assert facts.call_s == {width: width / 1000 for width in facts.exact_widths}
    return facts.exact_widths


def test_measured_once_then_remembered(artifact: Path, tmp_path: Path) -> None:
    measure = Measure()
    assert remember(artifact, tmp_path / "a" / "b", measure) == (2, 4)
    assert remember(artifact, tmp_path / "a" / "b", measure) == (2, 4)
    assert measure.calls == 1


def test_no_width_at_all_is_remembered_as_well(artifact: Path, tmp_path: Path) -> None:
    measure = Measure(())
    assert remember(artifact, tmp_path, measure) == remember(artifact, tmp_path, measure) == ()
    assert measure.calls == 1


@pytest.mark.parametrize("key", [{"threads": 1}, {"threads": None}, {"engine": "engine 2"}])
def test_other_threads_or_engines_are_measured_anew(artifact: Path, tmp_path: Path, key: dict[str, Any]) -> None:
    remember(artifact, tmp_path / "c", Measure())
    other = Measure((6,))
    assert remember(artifact, tmp_path / "c", other, **key) == (6,)
    assert other.calls == 1


def test_another_artifact_is_measured_anew(artifact: Path, tmp_path: Path) -> None:
    remember(artifact, tmp_path / "c", Measure())
    (artifact / "manifest.json").write_text('{"changed": 1}')
    other = Measure()
    remember(artifact, tmp_path / "c", other)
    assert other.calls == 1


def test_another_processor_is_measured_anew(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(artifact, tmp_path / "c", Measure())
    monkeypatch.setattr(machine, "processor", lambda: "another one")
    other = Measure()
    remember(artifact, tmp_path / "c", other)
    assert other.calls == 1


def test_the_artifact_is_not_written_to(artifact: Path, tmp_path: Path) -> None:
    remember(artifact, tmp_path / "c", Measure())
    assert [path.name for path in artifact.iterdir()] == ["manifest.json"]
    assert len(list((tmp_path / "c").iterdir())) == 1, "a temporary file was left"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b"[]", b"5", b"\xff\xfe", b'{"key": 1, "exact_widths": [2]}', b"{}"]
)
def test_a_corrupt_cache_file_is_measured_anew_and_mended(artifact: Path, tmp_path: Path, content: bytes) -> None:
    cache, measure = tmp_path / "c", Measure()
    remember(artifact, cache, measure)
    (path,) = cache.iterdir()
    path.write_bytes(content)
    assert remember(artifact, cache, measure) == (2, 4)
    assert remember(artifact, cache, measure) == (2, 4)
    assert measure.calls == 2


@pytest.mark.parametrize(
    "wrong",
    [{"exact_widths": widths} for widths in (None, 5, "x", ["x"], [None], [2])]
    + [
        {"call_s": call_s}
        for call_s in (None, 5, [1], {}, {"2": "x", "4": 1}, {"2": 0, "4": 1}, {"2": 1, "x": 1}, {"2": 1})
    ],
)
def test_facts_of_a_wrong_type_or_extent_are_measured_anew(
    artifact: Path, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    cache, measure = tmp_path / "c", Measure()
    remember(artifact, cache, measure)
    (path,) = cache.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    assert remember(artifact, cache, measure) == (2, 4)
    assert measure.calls == 2


def test_a_cache_that_cannot_be_written_is_said_once_per_measurement(
    artifact: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    measure = Measure()
    assert remember(artifact, tmp_path / "file" / "cache", measure) == (2, 4)
    assert remember(artifact, tmp_path / "file" / "cache", measure) == (2, 4)
    assert measure.calls == 2
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "it will be measured again" in caplog.text


def test_a_folder_in_the_place_of_the_file_costs_a_measurement(artifact: Path, tmp_path: Path) -> None:
    cache, measure = tmp_path / "c", Measure()
    remember(artifact, cache, measure)
    (path,) = cache.iterdir()
    path.unlink()
    path.mkdir()
    assert remember(artifact, cache, measure) == (2, 4)
    assert measure.calls == 2


def test_the_processor_is_described_alike_each_time() -> None:
    assert processor() == processor()
    assert "cores" in processor()


def test_the_default_place_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machine.default_cache_dir() == tmp_path / ".cache" / "specrt" / "machine"


def test_a_choice_is_kept_beside_what_was_measured(artifact: Path, tmp_path: Path) -> None:
    file, measure = MachineFile(artifact, engine="engine 1", threads=2, cache_dir=tmp_path / "c"), Measure()
    assert file.facts(measure).choice is None
    for choice in (Choice(drafter="ngram", k="auto", max_step_ms=9.5), Choice(drafter="none", k=0), None):
        file.choose(choice)
        facts = file.facts(measure)
        assert facts.choice == choice
        assert facts.exact_widths == (2, 4)
    assert measure.calls == 1


@pytest.mark.parametrize("choice", [5, "ngram", {"drafter": "ngram"}, {"drafter": "ngram", "k": 1, "more": 2}])
def test_a_damaged_choice_costs_a_measurement(artifact: Path, tmp_path: Path, choice: Any) -> None:
    cache, measure = tmp_path / "c", Measure()
    remember(artifact, cache, measure)
    (path,) = cache.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"choice": choice}))
    assert remember(artifact, cache, measure) == (2, 4)
    assert measure.calls == 2


def test_a_choice_that_cannot_be_kept_is_an_error(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = MachineFile(artifact, engine="engine 1", threads=2, cache_dir=tmp_path / "file" / "cache")
    with pytest.raises(RequestError, match=r"cannot keep the choice in .*: name another cache folder"):
        file.choose(Choice(drafter="ngram", k=3))


def test_that_prefill_calls_share_the_bits_is_remembered_and_not_assumed(artifact: Path, tmp_path: Path) -> None:
    file = MachineFile(artifact, engine="engine 1", threads=1, cache_dir=tmp_path)
    for shared in (True, False):
        known = file.facts(lambda shared=shared: MachineFacts((2,), {2: 0.1}, exact_prefill=shared))  # type: ignore[misc]
        assert known.exact_prefill == shared
        assert file.facts(Measure()) == known
        data = json.loads(file.path.read_text("utf-8"))
        del data["exact_prefill"]
        file.path.write_text(json.dumps(data), "utf-8")  # as written before it was measured
