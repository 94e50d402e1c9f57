"""Rotary embeddings as tables, and which pairing of values a model's own formula uses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

RotaryStyle = Literal["half", "interleaved"]
Apply = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Rotary:
    """Tables [S, r / 2] that rotate the first r values of every head.

    `half` pairs value i with value i + r / 2 (Llama), `interleaved` pairs 2i with 2i + 1 (GPT-J, Cohere).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    style: RotaryStyle


class RotaryTable(nn.Module):
    """Stands in for a model's rotary module: cos and sin [1, W, r] are read from tables which that module made.

    A model with one set of angles per layer type (Gemma 3) gets one pair of tables per type. Rows from `capacity` to
    `slots` repeat the last one: only padded positions reach them. `apply` is the model's function that rotates query
    and key; `fused` tells whether the attention operator can do the same from `rotary(...)`. `dtype` is the type
    of query and key, which the model's own rotation is done in; tables for the operator are in fp32.
    """

    def __init__(
        self, original: nn.Module, apply: Apply, *, capacity: int, slots: int, head_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        self._fused: dict[str, RotaryStyle] = {}
        self.seen: dict[int, tuple[torch.Tensor, str]] = {}
        positions, hidden = torch.arange(capacity)[None], torch.zeros(1, 1, 1)
        for kind in getattr(original, "layer_types", None) or [""]:
            extra = {"layer_type": kind} if kind else {}
            pair = original(hidden, position_ids=positions, **extra)
            cos, sin = (torch.cat([t[0], t[0][-1:].expand(slots - capacity, -1)]).float() for t in pair)
            self._add(kind, "cos", "sin", cos.to(dtype), sin.to(dtype))
            match = match_formula(apply, cos, sin, head_dim=head_dim)
            if match is not None:
                self._fused[kind] = match.style
                self._add(kind, "half_cos", "half_sin", match.cos, match.sin)

    def forward(self, _: torch.Tensor, position_ids: torch.Tensor, layer_type: str = "") -> tuple[torch.Tensor, ...]:
        """Return cos and sin [1, W, r], and remember which tables they came from."""
        cos, sin = (self.get_buffer(f"{name}_{layer_type}")[position_ids] for name in ("cos", "sin"))
        self.seen[id(cos)] = (cos, layer_type)
        return cos, sin

    def rotary(self, cos: torch.Tensor) -> Rotary | None:
        """Return the tables behind a `cos` that `forward` returned, if the attention operator can use them."""
        _, kind = self.seen.get(id(cos), (None, None))
        if kind not in self._fused:
            return None
        return Rotary(self.get_buffer(f"half_cos_{kind}"), self.get_buffer(f"half_sin_{kind}"), self._fused[kind])

    def _add(self, kind: str, cos_name: str, sin_name: str, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.register_buffer(f"{cos_name}_{kind}", cos.contiguous(), persistent=False)
        self.register_buffer(f"{sin_name}_{kind}", sin.contiguous(), persistent=False)


def match_formula(apply: Apply, cos: torch.Tensor, sin: torch.Tensor, *, head_dim: int) -> Rotary | None:
    """Find out by trying which pairing `apply(query, key, cos, sin)` performs with tables [S, r].

    Returns None when it is none that the attention operator knows, or when head size or r are not multiples of
    16, which that operator's rotation needs.
    """
    if head_dim % 16 or cos.shape[-1] % 16 or cos.shape[-1] > head_dim:
        return None
    rows = slice(1, 6)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, cos[rows].shape[0], head_dim, generator=generator)
    key = torch.randn(1, 1, cos[rows].shape[0], head_dim, generator=generator)
    try:
        wanted: Any = apply(query, key, cos[rows][None], sin[rows][None])
    except (TypeError, RuntimeError, ValueError):
        return None
    half = cos.shape[-1] // 2
    candidates: list[tuple[RotaryStyle, slice]] = [
        ("half", slice(0, half)),
        ("interleaved", slice(0, None, 2)),
        ("interleaved", slice(0, half)),
    ]
    for style, columns in candidates:
        rotary = Rotary(cos[:, columns], sin[:, columns], style)
        if all(
            torch.allclose(rotate(x, rotary, rows), y, atol=1e-5) for x, y in zip((query, key), wanted, strict=True)
        ):
            return rotary
    return None


def rotate(x: torch.Tensor, rotary: Rotary, rows: slice) -> torch.Tensor:
    """Rotate x [1, H, T, D] by table rows `rows`, as the attention operator does (Su et al. 2021, eq. 34)."""
    cos, sin = rotary.cos[rows], rotary.sin[rows]
    size = 2 * cos.shape[-1]
    half = size // 2
    split = (slice(0, half), slice(half, size)) if rotary.style == "half" else (slice(0, size, 2), slice(1, size, 2))
    out = x.clone()
    first, second = x[..., split[0]], x[..., split[1]]
    out[..., split[0]] = first * cos - second * sin
    out[..., split[1]] = second * cos + first * sin
    return out
