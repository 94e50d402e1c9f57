"""The training loop: AdamW over unrolled steps, resumable at every checkpoint."""

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from specrt_export.distill.data import Dataset, batches
from specrt_export.distill.head import Head
from specrt_export.distill.loss import Batch, LossOptions, agreement, loss
from specrt_export.distill.unroll import unrolling
from specrt_export.errors import ExportError

_SPREAD = 2  # batches that one update is made of: they differ in length
EVALUATED = 5  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """How a head is trained: `epochs` times over the texts, in updates of about `batch` tokens.

    Chains of `steps` begin at the share `chains` of the rows. `averaging`: of the weights, from update to update.
    """

    epochs: int = 8
    batch: int = 1024
    steps: int = 5
    chains: float = 0.25
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup: int = 50
    regression: float = 0.1
    decay: float = 0.8
    averaging: float = 0.998
    seed: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """Where training is: updates done, of how many, and the loss smoothed over the last updates."""

    update: int
    updates: int
    loss: float


class Training(ABC):
    """A drafter, its averaged copy and the optimiser; every update is a function of plan, data and number.

    Parameters that need no gradient stay as they are, and out of checkpoints.
    """

    def __init__(self, drafter: nn.Module, dataset: Dataset, plan: TrainingPlan) -> None:
        self._drafter, self._dataset, self._plan = drafter, dataset, plan
        self._parameters = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        decayed = [p for p in self._parameters.values() if p.ndim > 1]
        others = [p for p in self._parameters.values() if p.ndim <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=plan.learning_rate, betas=(0.9, 0.95),
        )  # fmt: skip
        self.average = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._per_epoch = self._count(0)
        self.state = State(0, plan.epochs * self._per_epoch, math.nan)

    def update(self) -> State:
        """Do one update."""
        plan, number = self._plan, self.state.update
        epoch, place = divmod(number, self._per_epoch)
        order = self._order(epoch)
        rate = plan.learning_rate * schedule(number, self.state.updates, plan.warmup)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        chosen = order[place * _SPREAD : (place + 1) * _SPREAD]
        generator = torch.Generator().manual_seed(plan.seed + number)
        value = 0.0
        self._drafter.train()
        for shard, documents in chosen:
            with torch.autocast("cpu", torch.bfloat16):
                part = self._loss(self._dataset.batch(shard, documents), generator) / len(chosen)
            part.backward()  # type: ignore[no-untyped-call]
            value += float(part.detach())
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), 1.0)
        self._optimizer.step()
        self._follow(number)
        smooth = value if math.isnan(self.state.loss) else 0.95 * self.state.loss + 0.05 * value
        self.state = State(number + 1, self.state.updates, smooth)
        return self.state

    def measure(self, dataset: Dataset) -> torch.Tensor:
        """Return over a dataset whether each token of the averaged drafter's chains is the text's: bool [steps, n]."""
        return self.over(dataset, self._agreement)

    def over(self, dataset: Dataset, measure: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
        """Return what `measure` gives of the averaged drafter over the batches of a dataset, side by side."""
        kept = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._put(self.average)
        self._drafter.eval()
        try:
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
                parts = [measure(batch) for batch in batches(dataset, num_tokens=self._plan.batch)]
        finally:
            self._put(kept)
        return torch.cat(parts, 1)

    def save(self, path: Path, about: dict[str, Any]) -> None:
        """Write everything that the next update depends on; `about` says what it belongs to."""
        tensors = {f"head.{name}": p.detach() for name, p in self._parameters.items()}
        tensors |= {f"average.{name}": p for name, p in self.average.items()}
        for name, p in self._parameters.items():
            tensors |= {f"{key}.{name}": value for key, value in self._optimizer.state.get(p, {}).items()}
        meta = {"about": json.dumps(about, sort_keys=True), "state": json.dumps(asdict(self.state))}
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata=meta)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def restore(self, path: Path, about: dict[str, Any]) -> None:
        """Go on from a checkpoint; raises `ExportError` when it belongs to something else."""
        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata() or {}
                found, state = json.loads(meta.get("about", "{}")), json.loads(meta.get("state", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise ExportError(f"{path}: not a readable checkpoint ({error}): delete it to begin again") from None
        if differing := sorted(key for key in about if found.get(key) != about[key]):
            key = differing[0]
            raise ExportError(
                f"{path}: of a training with {key} {found.get(key)!r}, not {about[key]!r}: delete it to begin again"
            )
        with torch.no_grad():
            for name, p in self._parameters.items():
                p.copy_(tensors[f"head.{name}"])
                self.average[name].copy_(tensors[f"average.{name}"])
                self._optimizer.state[p] = {key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
        self.state = State(state["update"], self.state.updates, state["loss"])

    @abstractmethod
    def _loss(self, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        """Return the loss of a batch."""

    @abstractmethod
    def _agreement(self, batch: Batch) -> torch.Tensor:
        """Return for chains of `EVALUATED` tokens whether each is the text's: bool [steps, n]."""

    def _order(self, epoch: int) -> list[Any]:
        return self._dataset.order(epoch, num_tokens=self._plan.batch // _SPREAD, seed=self._plan.seed)

    def _count(self, epoch: int) -> int:
        return -(-len(self._order(epoch)) // _SPREAD)

    def _follow(self, number: int) -> None:
        """Move the average towards the head: slowly, but fast in the beginning."""
        keep = min(self._plan.averaging, (1 + number) / (10 + number))
        with torch.no_grad():
            for name, p in self._parameters.items():
                self.average[name].lerp_(p, 1 - keep)

    def _put(self, values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, p in self._parameters.items():
                p.copy_(values[name])


class Trainer(Training):
    """Training of a head; `rows` [V, H] of the target's output matrix are the tokens that it can guess."""

    def __init__(self, head: Head, dataset: Dataset, rows: torch.Tensor, plan: TrainingPlan) -> None:
        super().__init__(head, dataset, plan)
        self.head, self._rows = head, rows

    def _loss(self, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        """Return the loss with chains that begin at random rows."""
        plan, length = self._plan, batch.weights.shape[1]
        possible = max(0, length - plan.steps + 1)
        starts = torch.randperm(possible, generator=generator)[: math.ceil(plan.chains * length)].sort().values
        options = LossOptions(steps=plan.steps, regression=plan.regression, decay=plan.decay)
        with unrolling(self.head) as unroll:
            return loss(unroll, batch, self._rows, starts, options)

    def _agreement(self, batch: Batch) -> torch.Tensor:
        with unrolling(self.head) as unroll:
            return agreement(unroll, batch, self._rows, steps=EVALUATED)


def schedule(update: int, updates: int, warmup: int) -> float:
    """Return the share of the learning rate at an update: linear warm-up, then a cosine down to a twentieth."""
    warmup = min(warmup, max(1, updates // 10))
    if update < warmup:
        return (update + 1) / warmup
    done = (update - warmup) / max(1, updates - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))
