"""Reference logits: what is kept of a text, and damaged files."""

from pathlib import Path

import numpy as np
import pytest

from specrt_profiles.errors import ManifestError
from specrt_profiles.reference import read_reference, write_reference

TEXTS = [[5, 6, 7, 8, 9, 1, 2], [3, 4]]


def make_logits(vocab_size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [(30 * rng.standard_normal((len(ids), vocab_size))).astype(np.float32) for ids in TEXTS]


@pytest.mark.parametrize("vocab_size", [7, 64, 300])
def test_what_is_read_is_what_was_written(tmp_path: Path, vocab_size: int) -> None:
    logits = make_logits(vocab_size)
    write_reference(tmp_path / "r.npz", TEXTS, logits)
    texts = read_reference(tmp_path / "r.npz")
    assert len(texts) == len(TEXTS)
    for text, ids, rows in zip(texts, TEXTS, logits, strict=True):
        assert text.ids.tolist() == ids
        np.testing.assert_array_equal(text.full, rows[text.full_rows])
        np.testing.assert_allclose(text.logsumexp, np.log(np.exp(rows.astype(np.float64)).sum(-1)), rtol=1e-12)
        np.testing.assert_array_equal(text.top, np.take_along_axis(rows, text.top_ids, -1))


def test_the_rows_kept_whole_are_the_first_a_middle_one_and_the_last(tmp_path: Path) -> None:
    write_reference(tmp_path / "r.npz", TEXTS, make_logits(9))
    first, second = read_reference(tmp_path / "r.npz")
    assert first.full_rows.tolist() == [0, 3, 6]
    assert second.full_rows.tolist() == [0, 1]


def test_the_64_largest_logits_of_every_row_are_kept_in_order_of_id(tmp_path: Path) -> None:
    logits = make_logits(300)
    write_reference(tmp_path / "r.npz", TEXTS, logits)
    for text, rows in zip(read_reference(tmp_path / "r.npz"), logits, strict=True):
        for top_ids, row in zip(text.top_ids, rows, strict=True):
            assert top_ids.tolist() == sorted(np.argsort(row)[-64:].tolist())


def test_logsumexp_holds_for_logits_that_overflow_an_exponential(tmp_path: Path) -> None:
    write_reference(tmp_path / "r.npz", [[1]], [np.array([[5000.0, 5000.0]], np.float32)])
    assert read_reference(tmp_path / "r.npz")[0].logsumexp[0] == pytest.approx(5000 + np.log(2))


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04", b"\x93NUMPY\x01\x00"])
def test_a_file_that_is_no_reference_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "target.reference.npz"
    path.write_bytes(content)
    with pytest.raises(ManifestError, match=r"target\.reference\.npz: not a readable reference"):
        read_reference(path)


def test_a_missing_file_a_single_array_and_a_missing_array_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    with pytest.raises(ManifestError, match=r"r\.npz"):
        read_reference(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ManifestError, match=r"r\.npz"):
        read_reference(path)
    np.savez(path, **{"ids.0": np.zeros(3, np.int64)})
    with pytest.raises(ManifestError, match=r"r\.npz"):
        read_reference(path)


def test_a_pickle_inside_is_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    np.savez(path, **{"ids.0": np.array([{"a": 1}], object)})
    with pytest.raises(ManifestError, match="allow_pickle=False"):
        read_reference(path)


def test_damage_anywhere_is_an_error_of_the_manifest_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    write_reference(path, TEXTS, make_logits(9))
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for position in rng.integers(0, len(whole), 300).tolist():
        broken = bytearray(whole)
        broken[position] ^= int(rng.integers(1, 256))
        for damaged in (bytes(broken), whole[:position]):
            path.write_bytes(damaged)
            try:
                read_reference(path)
            except ManifestError:
                refused += 1
    assert refused > 400
