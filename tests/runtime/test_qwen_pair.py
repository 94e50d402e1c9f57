"""A real pair of models with one tokenizer: Qwen2.5-Coder 0.5B drafting for 1.5B, on code and Chinese."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specrt
from real import Recorder, exported

pytestmark = pytest.mark.qwen
CODE = (
    "def mean(values):\n",
    "Write a Python function that returns the n-th Fibonacci number iteratively, then one with recursion and a cache.",
    "Write a Python class for a stack with push, pop and peek, and a short example.",
)
CHINESE = ("用三句话介绍一下长城。", "请把下面的句子翻译成英文：明天早上八点我们在图书馆门口见面。")


@pytest.fixture(scope="module")
def pair(real_folder: Path, machine_cache: Path) -> Iterator[specrt.LanguageModel]:
    draft = "qwen2.5-coder-0.5b"
    settings = {"precision": "int8", "draft_precision": "int8"}
    artifact = exported(real_folder, "qwen-int8", "qwen2.5-coder-1.5b", draft=draft, **settings)
    with specrt.load(artifact, cache_dir=machine_cache) as model:
        yield model


def generate(model: specrt.LanguageModel, prompt: str, **options: Any) -> tuple[specrt.Result, list[bytes]]:
    recorder: Any = Recorder(model.target)
    with model.start([{"role": "user", "content": prompt}], {"max_tokens": 64, **options}, target=recorder) as stream:
        for _ in stream:
            pass
    first = stream.result.stats.num_prompt_tokens
    return stream.result, [recorder.rows[first + i] for i in range(len(stream.result.token_ids))]


@pytest.mark.parametrize("prompt", [*CODE, *CHINESE])
def test_the_output_is_bitwise_that_of_plain_decoding(pair: specrt.LanguageModel, prompt: str) -> None:
    plain, rows = generate(pair, prompt, k=0)
    for drafter, k in (("model", 3), ("model", 5), ("model", 9), ("ngram", 5)):
        result, speculative_rows = generate(pair, prompt, drafter=drafter, k=k)
        assert result.token_ids == plain.token_ids
        assert speculative_rows == rows


def test_code_is_drafted_well(pair: specrt.LanguageModel) -> None:
    stats = [generate(pair, prompt, drafter="model", k=5)[0].stats for prompt in CODE]
    assert sum(s.num_tokens for s in stats) / sum(s.num_steps for s in stats) > 3
