"""Text that a model writes by itself, and what its products see while it reads it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specrt_export.parity import as_fp32

_OPENINGS = ("The", "def", "1", "I", "Question", "今", "In", "import")
_TOKENS = 96  # written per opening


def self_written(model: Any, tokenizer: Any, *, longest: int) -> list[list[int]]:
    """Return texts that the model continues from short openings, sampled at temperature 1 with a fixed seed.

    A model with a chat template also writes conversations, from the beginning of a user's message on. No text is
    longer than `longest` tokens.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        starts = [[tokenizer.encode(text)[:2] for text in _OPENINGS], [_chat_opening(tokenizer)] * len(_OPENINGS)]
        return [text for batch in starts for text in _continue(model, batch, longest)]


def observe(
    model: nn.Module, texts: Sequence[Sequence[int]], groups: Sequence[Sequence[str]]
) -> dict[str, NDArray[np.float32]]:
    """Run the model over texts; return the largest magnitude per channel [K] that each group's products saw.

    groups: parameter names of products with one input; the result has the first of each.
    """
    largest: dict[str, torch.Tensor] = {}

    def see(name: str, rows: torch.Tensor) -> None:
        peak = rows.abs().amax(0)
        largest[name] = torch.maximum(largest[name], peak) if name in largest else peak

    _watch(model, texts, groups, see)
    return {name: peak.numpy() for name, peak in largest.items()}


def inputs_of(
    model: nn.Module, texts: Sequence[Sequence[int]], groups: Sequence[Sequence[str]]
) -> dict[str, torch.Tensor]:
    """Run the model over texts of n tokens in all; return the input [n, K], bfloat16, of each group's products.

    groups: as for `observe`.
    """
    seen: dict[str, list[torch.Tensor]] = {group[0]: [] for group in groups}
    _watch(model, texts, groups, lambda name, rows: seen[name].append(rows.bfloat16()))
    return {name: torch.cat(parts) for name, parts in seen.items()}


def _watch(
    model: nn.Module, texts: Sequence[Sequence[int]], groups: Sequence[Sequence[str]],
    see: Callable[[str, torch.Tensor], None],
) -> None:  # fmt: skip
    """Run the model over texts and show each group's input rows [n, K], float32, with the group's first name."""

    def hook_for(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            see(name, inputs[0].detach().float().reshape(-1, inputs[0].shape[-1]))

        return hook

    owners = {group[0]: model.get_submodule(group[0].rpartition(".")[0]) for group in groups}
    handles = [module.register_forward_pre_hook(hook_for(name)) for name, module in owners.items()]
    try:
        with torch.no_grad(), as_fp32(model):
            for ids in texts:
                model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


def _chat_opening(tokenizer: Any) -> list[int]:
    """Return what comes before the words of a user's first message, or nothing without a chat template."""
    if not tokenizer.chat_template:
        return []
    mark = "\u2603"
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    except Exception:  # a template may refuse anything
        return []
    before, found, _ = text.partition(mark)
    return list(tokenizer.encode(before, add_special_tokens=False)) if found else []


def _continue(model: Any, starts: Sequence[Sequence[int]], longest: int) -> list[list[int]]:
    size = min(map(len, starts))
    if size == 0:
        return []
    count = max(1, min(_TOKENS, longest - size))
    out = model.generate(
        torch.tensor([list(start[-size:]) for start in starts]), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        min_new_tokens=count, max_new_tokens=count, pad_token_id=0,
    )  # fmt: skip
    texts: list[list[int]] = out.tolist()
    return texts
