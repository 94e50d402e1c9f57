"""Trees on the real default model: strict requests have plain decoding's bits, others differ by less than a bound."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
from parts import ListDrafter, grow, run
from real import Recorder, exported
from specrt.acceptance import Proposal
from specrt.prompts import load_prompts
from specrt_export.catalogue import own_head

pytestmark = pytest.mark.slow
PROMPTS = [prompt.text for prompt in load_prompts(None, limit=1)]  # one of each category
MAX_TOKENS = 40
BOUND = 2e-4  # of a logit; the largest difference seen was 7e-5
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "gumbel": {"temperature": 0.8, "seed": 4},
    "rejection": {"temperature": 0.8, "seed": 4, "coupling": "rejection"},
}


@pytest.fixture(scope="module")
def model(real_folder: Path, machine_cache: Path) -> Iterator[specrt.LanguageModel]:
    head = own_head("smollm2-135m")
    assert head is not None
    artifact = exported(real_folder, "smollm2-fp32-trees", "smollm2-135m", heads=(head,), trees=True)
    with specrt.load(artifact, cache_dir=machine_cache) as loaded:
        yield loaded


@pytest.fixture(scope="module", params=PARAMS)
def plain(request: pytest.FixtureRequest, model: specrt.LanguageModel) -> tuple[str, list[tuple[Any, ...]]]:
    """How requests sample, and what plain decoding says to each prompt."""
    return request.param, [decode(model, prompt, None, **PARAMS[request.param]) for prompt in PROMPTS]


class Kept(Recorder):
    """Records the rows that were kept, each under its token's place in the text."""

    def verify(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> np.ndarray:
        self._start, logits = self.kv_length, self._engine.verify(token_ids, parents)
        self._latest = logits.copy()
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        self.rows |= {self._start + 1 + place: self._latest[row].tobytes() for place, row in enumerate(rows)}
        self._engine.keep(rows)


def second_branch(plain: Sequence[int], prompt: int) -> ListDrafter:
    """Guess what plain decoding says, always in second place: no accepted path is a first branch."""

    def guess(known: Sequence[int], limit: int) -> Proposal:
        def children(path: list[int]) -> list[int]:
            at = len(known) - prompt + len(path)
            right = plain[at] if at < len(plain) else 0
            return [right + 5, right]

        return grow(children, (2, 2, 2), limit)

    return ListDrafter(guess)


def decode(model: specrt.LanguageModel, text: str, plain: Sequence[int] | None, **options: Any) -> tuple[Any, ...]:
    """Return ids, rows [n, V] and statistics of plain decoding, or of trees that guess it."""
    rendered = model.tokenizer.render([{"role": "user", "content": text}], None)
    prompt = model.tokenizer.encode(rendered, add_special_tokens=False)
    target: Any = Kept(model.target)
    drafter = None if plain is None else second_branch(plain, len(prompt))
    ids, loop, _ = run(target, drafter, k=14, prompt=prompt, max_tokens=MAX_TOKENS, **options)
    rows = np.stack([np.frombuffer(target.rows[len(prompt) + i], np.float32) for i in range(len(ids))])
    return ids, rows, loop.stats


def test_strict_requests_have_the_bits_of_plain_decoding(
    model: specrt.LanguageModel, plain: tuple[str, list[tuple[Any, ...]]]
) -> None:
    name, expected = plain
    for prompt, (ids, rows, _) in zip(PROMPTS, expected, strict=True):
        found, strict_rows, stats = decode(model, prompt, ids, strict=True, **PARAMS[name])
        assert found == ids
        np.testing.assert_array_equal(strict_rows, rows)
        assert stats.num_accepted > MAX_TOKENS / 2
        assert stats.num_recomputed >= stats.num_steps - 2, "all but the last steps, which have no room"


def test_other_requests_differ_by_less_than_the_bound(
    model: specrt.LanguageModel, plain: tuple[str, list[tuple[Any, ...]]]
) -> None:
    (name, expected), worst = plain, 0.0
    for prompt, (ids, rows, _) in zip(PROMPTS, expected, strict=True):
        found, tree_rows, stats = decode(model, prompt, ids, **PARAMS[name])
        assert stats.num_accepted > 0
        same = next((i for i, (a, b) in enumerate(zip(ids, found, strict=True)) if a != b), len(ids))
        if same < len(ids):
            assert name == "greedy", "a near tie under noise: look at it, and say so here"
            best = np.sort(rows[same])[-2:]
            assert best[1] - best[0] < 2 * BOUND
        worst = max(worst, float(np.abs(tree_rows[: same + 1] - rows[: same + 1]).max()))
    assert 0 < worst < BOUND


def test_a_tree_of_the_head_brings_more_than_a_chain_of_as_many_guesses(model: specrt.LanguageModel) -> None:
    found = {}
    for shape in (False, True):
        messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        runs = [
            model.generate(prompt, temperature=0, max_tokens=MAX_TOKENS, k=5, drafter="eagle", tree=shape)
            for prompt in messages
        ]
        assert all(result.stats.num_proposed <= 5 * result.stats.num_steps for result in runs)
        found[shape] = sum(result.stats.num_steps for result in runs)
    assert found[True] < found[False]
