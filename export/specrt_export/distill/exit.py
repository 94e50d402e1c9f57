"""Early exits: which layer, where to begin, and healing on the text that the target wrote.

An exit is a translator before the target's own final norm and output matrix (see `exit_fit`). It begins as the closed
form and learns what pruned drafts learn; all else is the target's and stays. What it reads at a row is exact as long as
the guesses before are the target's, so that chains are measured on the target's own words.
"""

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from specrt_export.decoder import decoder_layers
from specrt_export.distill.call import Call, DistillRequest, train_on
from specrt_export.distill.card import ExitCard, Target, tools, write_exit
from specrt_export.distill.data import Texts
from specrt_export.distill.heal import Healing, healing_texts
from specrt_export.distill.loss import Batch, block_efficiency, by_step
from specrt_export.distill.shards import TextShard
from specrt_export.distill.train import State, TrainingPlan
from specrt_export.distill.work import Work
from specrt_export.exit_fit import ExitHead, best_chain, best_exit, exit_cost, final_norm, fit_exits

EXIT_HEALING = TrainingPlan(epochs=4)
_COMPARED = 4096  # tokens that the exits of all layers are fitted to
_FITTED = 16_384  # tokens that the exit which is chosen is fitted to
_SIZED = 2048  # rows that the size of states is measured over


class ExitTranslator(nn.Module):
    """A translator and the target's final norm: state [.., H] to what the output matrix reads.

    It learns how far it is from `start`, in units of the median size of `states` [n, H] before and after: so one
    learning rate fits all targets, and weight decay leads to the start.
    """

    def __init__(self, start: ExitHead, norm: nn.Module, states: torch.Tensor) -> None:
        super().__init__()
        size = states.shape[-1]
        translator = torch.eye(size) if start.translator is None else start.translator
        bias = torch.zeros(size) if start.bias is None else start.bias
        self._layer = start.layer
        self._before, self._after = _size(states), _size(states @ translator + bias)
        self._translator, self._bias = translator * (self._before / self._after), bias / self._after
        self.turn, self.shift = nn.Parameter(torch.zeros(size, size)), nn.Parameter(torch.zeros(size))
        self.norm = copy.deepcopy(norm).float().requires_grad_(False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return what the output matrix reads, [.., H] for states [.., H]."""
        made = (states / self._before) @ (self._translator + self.turn) + (self._bias + self.shift)
        found: torch.Tensor = self.norm(made * self._after)
        return found

    def head(self, values: Mapping[str, torch.Tensor]) -> ExitHead:
        """Return the exit with these values of the parameters."""
        return ExitHead(
            layer=self._layer,
            translator=(self._translator + values["turn"]) * (self._after / self._before),
            bias=(self._bias + values["shift"]) * self._after,
        )


class ExitHealing(Healing):
    """Training of an early exit."""

    def _read(self, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = self._drafter(batch.features.float())
        return found


def open_exit(call: Call, model: Any, work: Work, text: TextShard) -> ExitHead:
    """Return what training begins with: the exit after the layers asked for, or else the best, in closed form.

    Layer and exit are kept in the work folder. text: the first that was written; its beginning is held out.
    """
    layer = _best_layer(call, model, work, text) if call.request.layers is None else call.request.layers
    path = work.folder / f"start-exit-{layer}.safetensors"
    if not path.is_file():
        with call.progress.step(f"fit the exit after layer {layer}"):
            [head], _ = fit_exits(model, _end_of(text, _FITTED), layers=[layer])
        given = {"translator": head.translator, "bias": head.bias}
        part = path.with_name(f".{path.name}.{os.getpid()}")
        save_file({name: tensor for name, tensor in given.items() if tensor is not None}, part)
        part.replace(path)
    kept = load_file(path)
    return ExitHead(layer=layer, translator=kept.get("translator"), bias=kept.get("bias"))


def heal_exit(
    call: Call, model: Any, work: Work, texts: list[Texts], start: ExitHead, target: Target, *, held_out: int
) -> Path:
    """Train an exit from `start` on, and write it."""
    request, plan = call.request, call.request.training
    learn, held, vocabulary = healing_texts(model, texts, request.vocabulary_size, held_out=held_out)
    norm, matrix = final_norm(model), model.get_output_embeddings().weight.detach()
    states = torch.from_numpy(np.array(texts[0].features.features[-_SIZED:])).float()
    plain = ExitHead(layer=start.layer, translator=None, bias=None)
    translator, untranslated = (ExitTranslator(head, norm, states) for head in (start, plain))
    training = ExitHealing(translator, learn, matrix, vocabulary, plan)
    begun = training.measure(held), ExitHealing(untranslated, learn, matrix, vocabulary, plan).measure(held)
    call.progress.say(
        f"exit after {start.layer} of {len(decoder_layers(model))} layers; greedy chains of 5 give "
        f"{block_efficiency(begun[0]):.2f} tokens per target call on held-out answers"
    )
    path = work.checkpoint(f"exit-{start.layer}")
    total = sum(len(part.text.tokens) for part in texts)
    about = {"tokens": total, "vocabulary": request.vocabulary_size, "layer": start.layer, **asdict(plan)}
    if path.is_file():
        training.restore(path, about)
    train_on(call, training, held, path, about)
    cost = exit_cost(model, start.layer, translated=True)
    found = _card(request, target, training.state, begun, training.measure(held), cost, layer=start.layer, tokens=total)
    write_exit(request.out, translator.head(training.average), found)
    call.progress.say(
        f"healed: {found.block_efficiency:.2f} tokens per target call; predicted speedup {found.speedup:.2f} "
        f"with k = {found.k}"
    )
    return request.out


def _card(
    request: DistillRequest, target: Target, state: State, begun: tuple[torch.Tensor, torch.Tensor],
    agreed: torch.Tensor, cost: float, *, layer: int, tokens: int,
) -> ExitCard:  # fmt: skip
    """Return the card of an exit; begun: what was measured in closed form, and without a translator."""
    before, plain = begun
    k, speedup = best_chain(sum(by_step(agreed)) / max(1, len(agreed)), cost)
    return ExitCard(
        layout="early-exit", target=target, layer=layer, tokens=tokens, updates=state.update,
        planned_updates=state.updates, loss=None if isnan(state.loss) else round(state.loss, 4),
        agreement_plain=by_step(plain), agreement_before=by_step(before),
        block_efficiency_before=round(block_efficiency(before), 3), agreement=by_step(agreed),
        block_efficiency=round(block_efficiency(agreed), 3), cost=round(cost, 4), speedup=round(speedup, 3), k=k,
        training=request.training, command=request.command, tools=tools(),
    )  # fmt: skip


def _best_layer(call: Call, model: Any, work: Work, text: TextShard) -> int:
    """Return the layer of the exit that is predicted to be the fastest; what was measured of all is kept."""
    path = work.folder / "exits.json"
    if not path.is_file():
        with call.progress.step("compare the exits of all layers"):
            _, measures = fit_exits(model, _end_of(text, _COMPARED))
        kept = {"best": best_exit(measures).layer, "measures": [asdict(measure) for measure in measures]}
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        part.replace(path)
    return int(json.loads(path.read_text("utf-8"))["best"])


def _end_of(shard: TextShard, num_tokens: int) -> list[list[int]]:
    """Return the last documents of a shard: so many tokens, and no more than half of them all."""
    begin = max(len(shard.tokens) // 2, len(shard.tokens) - num_tokens)
    starts = shard.offsets[:-1][shard.offsets[:-1] >= begin]
    return [part.tolist() for part in np.split(shard.tokens, starts)[1:]]


def _size(states: torch.Tensor) -> float:
    return float(states.pow(2).mean(-1).sqrt().median())
