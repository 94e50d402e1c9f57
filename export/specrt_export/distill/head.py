"""Heads in torch: one decoder layer of the target's own kind that reads tokens and features.

`eagle` is the layout of EAGLE-1 and 2 (arXiv 2401.15077): x = fc(embedding, feature), one layer without its first norm,
whose output stands for the target's next feature. `eagle3` is that of EAGLE-3 (arXiv 2503.01840): the features of three
layers are first joined by fc; the layer attends from embedding and joined feature side by side, and a norm comes before
the output matrix. In both, the output of a step is the feature of the next one, and the output matrix is rows of the
target's.
"""

import copy
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModel

from specrt_export.decoder import cache_argument, decoder_layers
from specrt_export.distill.features import taps
from specrt_export.errors import UnsupportedModelError

Layout = Literal["eagle", "eagle3"]
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class Head(nn.Module):
    """A head of either layout for the target that `config` describes; `ffn` overrides the feed-forward width."""

    def __init__(self, config: Any, layout: Layout, *, ffn: int | None = None) -> None:
        super().__init__()
        hidden = int(config.hidden_size)
        self.layout = layout
        self.ffn = int(ffn or config.intermediate_size)
        self.decoder = _one_layer(config, self.ffn)
        self._cache = cache_argument(self.decoder)
        if layout == "eagle":
            self.fc = nn.Linear(2 * hidden, hidden)
            self.decoder.layers[0].input_layernorm = nn.Identity()
            self.norm: nn.Module = nn.Identity()
        else:
            self.fc = nn.Linear(3 * hidden, hidden, bias=False)
            self.norm = self.decoder.norm
            self.decoder.layers[0].input_layernorm = _SideBySide(self.decoder.layers[0].input_layernorm)
            _widen(self.decoder.layers[0].self_attn)
        self.decoder.norm = nn.Identity()
        self.decoder.set_input_embeddings(nn.Identity())

    def begin(self, features: torch.Tensor) -> torch.Tensor:
        """Return the first step's feature [B, T, H] for the target's features [B, T, F]."""
        return features if self.layout == "eagle" else self.fc(features)

    def forward(
        self, embeddings: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """Return the next step's feature [B, T, H] for embeddings of the next tokens and features, both [B, T, H].

        positions: [1, T]. `cache` and the attention function that is in force decide what a row attends to.
        """
        if self.layout == "eagle":
            x = self.fc(torch.cat([embeddings, feature.to(embeddings.dtype)], -1))
        else:
            x = feature
            self.decoder.layers[0].input_layernorm.beside.embeddings = embeddings
        out = self.decoder(inputs_embeds=x, position_ids=positions, use_cache=True, **{self._cache: cache})
        result: torch.Tensor = out.last_hidden_state
        return result

    def logits(self, feature: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return logits [.., V] of a step's output [.., H] for rows [V, H] of the target's output matrix."""
        return nn.functional.linear(self.norm(feature), rows)


class _Beside:
    """Holds a tensor that is no part of a module's state, which is what the exporter would take it for."""

    embeddings = torch.empty(0)


class _SideBySide(nn.Module):
    """Norm of the embeddings beside norm of the feature: what an EAGLE-3 layer's attention reads."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = norm, copy.deepcopy(norm)
        self.beside = _Beside()

    def forward(self, feature: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.input_layernorm(self.beside.embeddings), self.hidden_norm(feature)], -1)


def head_for(model: Any, layout: Layout, *, ffn: int | None, seed: int) -> Head:
    """Return a head for a target, with new weights; raises `UnsupportedModelError` for layers of another kind."""
    last = decoder_layers(model)[-1]
    needed = ("input_layernorm", "self_attn", "mlp")
    if not all(hasattr(last, name) for name in needed) or getattr(model.config, "intermediate_size", None) is None:
        raise UnsupportedModelError(f"{type(model).__name__} has layers of a kind that heads are not made for")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Head(model.config, layout, ffn=ffn)


def feature_layers(config: Any, layout: Layout) -> tuple[int, ...]:
    """Return the layers whose inputs a head reads; none for what the output matrix reads."""
    return taps(layout, int(config.num_hidden_layers))


def _one_layer(config: Any, ffn: int) -> Any:
    """Return the target's decoder with one full-attention layer and no embedding, in float32, with new weights."""
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.intermediate_size = 1, ffn
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    config.vocab_size = 1
    config.pad_token_id = None
    return AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)


def _widen(attention: Any) -> None:
    for name in _PROJECTIONS:
        old = getattr(attention, name, None)
        if not isinstance(old, nn.Linear):
            raise UnsupportedModelError(f"{type(attention).__name__} has no {name} that an eagle3 head could widen")
        setattr(attention, name, nn.Linear(2 * old.in_features, old.out_features, bias=old.bias is not None))
