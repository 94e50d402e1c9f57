"""What goes together in one export: heads of several kinds and an early exit, and what does not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import specrt
import tiny
from specrt_export.errors import ExportError, UnsupportedModelError

OPTIONS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logprobs": 1}


def exit_file(folder: Path, *, layer: int = 1, size: int = 64) -> Path:
    path = folder / "exit.safetensors"
    tensors = {"translator.weight": torch.eye(size), "translator.bias": torch.zeros(size)}
    save_file(tensors, path, metadata={"layer": str(layer)})
    return path


def test_one_artifact_has_all_families(exit_artifact: Path, machine_cache: Path) -> None:
    with specrt.load(exit_artifact, cache_dir=machine_cache) as model:
        names = ("ngram", "suffix", "eagle", "medusa", "early-exit", "combined")
        assert model.manifest.drafter_names == names
        assert model.manifest.default_drafter == "combined"
        plain = model.generate([5, 9, 40], k=0, **OPTIONS)
        for drafter in (*names, "suffix+medusa", "ngram+early-exit"):
            result = model.generate([5, 9, 40], k=3, drafter=drafter, **OPTIONS)
            assert (result.token_ids, result.logprobs) == (plain.token_ids, plain.logprobs)
            assert result.stats.num_drafter_faults == 0


def refused(source: Path, out: Path, error: type[Exception], words: str, **request: Any) -> None:
    with pytest.raises(error, match=words):
        tiny.export_tiny(source, out, draft=None, **request)
    assert not out.exists()


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    source = tiny.make_model("llama", tmp_path / "source", num_hidden_layers=8)
    eagle = tiny.make_head(source, tmp_path / "eagle.safetensors", "eagle")
    third = tiny.make_head(source, tmp_path / "eagle3.safetensors", "eagle3")
    medusa = tiny.make_medusa(source, tmp_path / "medusa.safetensors", matrices=0)
    out, given = tmp_path / "out", exit_file(tmp_path)
    for words, request in {
        "expected one file per drafter, found two for eagle": {"heads": (eagle, third)},
        "expected heads that read the same layers": {"heads": (third, medusa)},
        "expected --early-exit or an exit's --head, found both": {"heads": (given,), "early_exit": 1},
        "expected no EAGLE-3 head beside it": {"heads": (third,), "early_exit": 1},
        "expected auto or 1 to 7 layers, found 8": {"early_exit": 8},
        "expected --precision fp32, int8 or int4, found fp16": {
            "early_exit": 1, "profile": tiny.profile(precision="fp16")
        },
        "--early-exit: expected --dialect ort, found tensorrt": {
            "early_exit": "auto", "profile": tiny.profile(dialect="tensorrt")
        },
    }.items():  # fmt: skip
        refused(source, out, ExportError, words, **request)


def test_a_model_without_a_list_of_layers_is_refused(tmp_path: Path) -> None:
    source = tiny.make_model("gpt2", tmp_path / "source")
    refused(source, tmp_path / "out", UnsupportedModelError, "not made for, nor early exits", early_exit="auto")


def test_an_exit_of_another_model_is_refused(tiny_source: Path, tmp_path: Path) -> None:
    given = exit_file(tmp_path, size=32)
    refused(tiny_source, tmp_path / "out", ExportError, r"expected translator\.weight \[64, 64\]", heads=(given,))
