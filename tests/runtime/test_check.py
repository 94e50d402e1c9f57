"""`specrt check`: a good artifact passes; a changed byte, other logits or dependent rows do not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copies import copy_artifact, edit_manifest, refresh
from specrt import check as check_module
from specrt.check import CheckReport, EngineCheck, check_artifact, replay
from specrt.errors import ManifestError
from specrt_profiles.manifest import read_manifest
from specrt_profiles.reference import read_reference
from toy import RowDependentEngine, ToyEngine

WIDTHS = (2, 4, 6, 10, 16)


def rewrite_reference(folder: Path, change: Callable[[dict[str, Any]], None], *, name: str = "target") -> None:
    """Change the arrays of an engine's reference, and make the manifest agree with the new file."""
    path = folder / read_manifest(folder).engines[name].reference
    with np.load(path) as file:
        arrays = {key: file[key].copy() for key in file.files}
    change(arrays)
    np.savez_compressed(path, **arrays)
    refresh(folder)


@pytest.fixture(scope="module")
def report(tiny_artifact: Path) -> CheckReport:
    return check_artifact(tiny_artifact, threads=1)


def test_a_good_artifact_has_no_problems(report: CheckReport, tiny_artifact: Path) -> None:
    assert report.problems == []
    assert report.num_files == len(read_manifest(tiny_artifact).files)
    assert [engine.name for engine in report.engines] == ["target", "draft"]


def test_the_target_is_as_close_as_it_was_at_export(report: CheckReport, tiny_artifact: Path) -> None:
    target, parity = report.engines[0], read_manifest(tiny_artifact).target.parity
    assert target.max_abs_diff < 1e-4
    assert target.top1_agreement == 1.0
    assert (target.exported_max_abs_diff, target.exported_mean_kl) == (parity.max_abs_diff, parity.mean_kl)
    assert target.num_rows > 100


def test_the_widths_are_grouped_by_their_bits(report: CheckReport) -> None:
    target = report.engines[0]
    assert target.groups == (WIDTHS,)
    assert (target.dependent, target.ladder, target.needs_exact_rows) == ((), WIDTHS, True)
    assert not report.engines[1].needs_exact_rows


def test_the_report_is_json(report: CheckReport) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    assert set(data) == {"artifact", "num_files", "engines", "problems"}
    assert set(data["engines"][0]) == set(EngineCheck.__dataclass_fields__)


def test_a_changed_byte_of_the_weights_is_found(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")
    path = folder / "target.onnx.data"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ManifestError, match=r"target\.onnx\.data: expected SHA-256 [0-9a-f]{64}, found [0-9a-f]{64}"):
        check_artifact(folder, threads=1)


def test_other_logits_than_the_references_are_a_problem(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")

    def shift(arrays: dict[str, Any]) -> None:
        arrays["top.0"][-2, 0] += 0.5

    rewrite_reference(folder, shift)
    report = check_artifact(folder, threads=1)
    assert any(problem.startswith("target: logits off by up to 0.5") for problem in report.problems)
    assert not any(problem.startswith("draft") for problem in report.problems)


def test_a_row_kept_whole_is_compared_whole(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")

    def shift(arrays: dict[str, Any]) -> None:
        row = int(arrays["full_rows.0"][-1])
        seldom = next(token for token in range(384) if token not in arrays["top_ids.0"][row])
        arrays["full.0"][-1, seldom] += 0.5

    rewrite_reference(folder, shift)
    (problem,) = check_artifact(folder, threads=1).problems
    assert "logits off by up to 0.5" in problem


def test_another_law_is_a_problem_of_its_own(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")

    def swap(arrays: dict[str, Any]) -> None:
        arrays["top.0"] = np.flip(arrays["top.0"], -1)

    rewrite_reference(folder, swap)
    report = check_artifact(folder, threads=1)
    assert any("target: mean KL" in problem for problem in report.problems)
    assert report.engines[0].top1_agreement < 1.0


def test_a_draft_is_checked_as_well(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")

    def shift(arrays: dict[str, Any]) -> None:
        arrays["top.0"] += 5.0

    rewrite_reference(folder, shift, name="draft")
    assert any(problem.startswith("draft: ") for problem in check_artifact(folder, threads=1).problems)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04garbage", b"not a zip"])
def test_a_damaged_reference_is_named(tiny_artifact: Path, tmp_path: Path, content: bytes) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")
    (folder / "target.reference.npz").write_bytes(content)
    refresh(folder)
    with pytest.raises(ManifestError, match=r"target\.reference\.npz: not a readable reference"):
        check_artifact(folder, threads=1)


def test_numbers_that_are_not_numbers_are_problems() -> None:
    nan = float("nan")
    engine = EngineCheck(
        name="target", num_rows=1, max_abs_diff=nan, mean_kl=nan, top1_agreement=0.0, exported_max_abs_diff=0.0,
        exported_mean_kl=0.0, groups=((2,),), dependent=(), ladder=(2,), exact_prefill=True,
        needs_exact_rows=True,
    )  # fmt: skip
    assert len(engine.problems) == 2


def test_a_distance_up_to_twice_that_of_the_export_is_accepted(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")

    def shift(arrays: dict[str, Any]) -> None:
        arrays["top.0"][-2, 0] += 0.5

    rewrite_reference(folder, shift)
    edit_manifest(folder, lambda data: data["engines"]["target"]["parity"].update(max_abs_diff=0.3, mean_kl=0.1))
    assert check_artifact(folder, threads=1).problems == []


def test_rows_that_depend_on_each_other_are_a_problem_of_the_target_only(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_manifest(tiny_artifact).target

    def with_dependent_rows(folder: Path, spec: Any, *, threads: int | None, device: str | None) -> RowDependentEngine:
        return RowDependentEngine(384, capacity=CAPACITY, prefill_width=16)

    monkeypatch.setattr(check_module, "open_engine", with_dependent_rows)
    target, draft = check_artifact(tiny_artifact).engines
    assert (target.ladder, target.groups) == ((), ())
    assert set(target.dependent) >= set(spec.verify_widths)
    assert "target: rows of a call influence each other at every width" in target.problems
    assert not any("influence" in problem for problem in draft.problems)


CAPACITY = 128


def test_engines_are_closed_even_when_a_check_fails(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Broken(ToyEngine):
        def prefill(self, token_ids: Any) -> None:
            raise ZeroDivisionError

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(check_module, "open_engine", lambda *_, **__: Broken(384))
    with pytest.raises(ZeroDivisionError):
        check_artifact(tiny_artifact)
    assert len(closed) == 1


@pytest.mark.parametrize("length", [2, 3, 7, 60])
def test_replay_gives_the_rows_of_the_text_in_calls_of_every_width(length: int) -> None:
    engine = ToyEngine(50)
    ids = [(7 * i) % 50 for i in range(length)]
    rows = replay(engine, ids)
    start = max(1, length // 3)
    expected = [engine._logits(ids[: index + 1]) for index in range(start, length)]
    assert np.array_equal(rows, np.stack(expected))
    if length == 60:
        assert set(WIDTHS) <= set(engine.widths_used)


def test_the_reference_covers_several_texts(tiny_artifact: Path) -> None:
    assert len(read_reference(tiny_artifact / "target.reference.npz")) >= 2
