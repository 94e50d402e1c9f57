"""Distances to the source, and the forms of it that peers read."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.peers.quality import equal_share, mean_kl, read_reference
from benchmarks.peers.source import rewrite_gguf


def logits(*rows: list[float]) -> np.ndarray:
    return np.log(np.array(rows, np.float32))


def test_kl_is_that_of_the_source_to_the_peer_averaged_over_rows() -> None:
    source, peer = logits([0.5, 0.5], [0.25, 0.75]), logits([0.25, 0.75], [0.25, 0.75])
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert mean_kl([source], [peer]) == pytest.approx(expected / 2, rel=1e-6)
    other_way = 0.25 * np.log(0.25 / 0.5) + 0.75 * np.log(0.75 / 0.5)
    assert mean_kl([peer], [source]) == pytest.approx(other_way / 2, rel=1e-6)


def test_kl_does_not_see_an_offset_or_padding() -> None:
    source = logits([0.5, 0.5])
    padded = np.concatenate([source + 3, np.full((1, 2), 9.0, np.float32)], 1)
    assert mean_kl([source], [padded]) == pytest.approx(0.0, abs=1e-9)


def test_kl_counts_every_row_once_however_the_texts_are_cut() -> None:
    source, peer = logits([0.5, 0.5], [0.1, 0.9], [0.5, 0.5]), logits([0.1, 0.9], [0.1, 0.9], [0.5, 0.5])
    assert mean_kl([source[:1], source[1:]], [peer[:1], peer[1:]]) == pytest.approx(mean_kl([source], [peer]))


def test_rubbish_has_no_kl() -> None:
    source = logits([0.5, 0.5])
    with pytest.raises(ValueError, match="not numbers"):
        mean_kl([source], [np.full((1, 2), np.nan, np.float32)])
    with pytest.raises(ValueError, match="expected 1 rows of logits, found 2"):
        mean_kl([source], [np.zeros((2, 2), np.float32)])


def test_equal_share_ends_at_the_first_difference() -> None:
    assert equal_share([1, 2, 9, 4], [1, 2, 3, 4]) == 0.5
    assert equal_share([1, 2], [1, 2, 3, 4]) == 0.5
    assert equal_share([1, 2, 3, 4], [1, 2, 3, 4]) == 1.0


def test_a_reference_is_read_back_in_order(tmp_path: Path) -> None:
    rows = [np.full((n, 3), n, np.float32) for n in (1, 2)]
    np.savez(tmp_path / "r.npz", texts=json.dumps([[5], [6, 7]]), **{f"logits.{i}": r for i, r in enumerate(rows)})
    texts, read = read_reference(tmp_path / "r.npz")
    assert texts == [[5], [6, 7]]
    assert [len(r) for r in read] == [1, 2]


@pytest.fixture
def q4_1(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A GGUF file with one Q4_1 matrix and a vector, and the values that the matrix has."""
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_context_length(77)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("w", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("norm", np.arange(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf", gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)


@pytest.mark.parametrize(("form", "bound"), [("F32", 0.0), ("F16", 2e-3), ("Q8_0", 2e-2)])
def test_a_rewritten_gguf_has_the_values_and_the_metadata(
    q4_1: tuple[Path, np.ndarray], tmp_path: Path, form: str, bound: float
) -> None:
    path, values = q4_1
    rewrite_gguf(path, tmp_path / "out.gguf", form)
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    tensors = {t.name: t for t in reader.tensors}
    assert tensors["w"].tensor_type == gguf.GGMLQuantizationType[form]
    assert np.abs(gguf.dequantize(tensors["w"].data, tensors["w"].tensor_type) - values).max() <= bound
    assert tensors["norm"].tensor_type == gguf.GGMLQuantizationType.F32
    assert tensors["norm"].data.tolist() == list(range(64))
    assert reader.fields["llama.context_length"].contents() == 77
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
