"""Does the exported graph compute what its source computes?

The source model's logits over a few texts are taken first (and kept as reference.npz, for `specrt check`), then the
graph goes over the same tokens as a generation would: prefill, verify, rollback after rejected tokens, verify again.

A quantised graph differs from its source by much more than a wrong one might. So its structure is proved by itself:
with products in fp32 it has to agree, as closely as an fp32 graph, with the source computing with the same rounded
weights.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specrt_export.errors import ExportError
from specrt_profiles.manifest import Parity
from specrt_profiles.profile import FloatName, Precision, Profile
from specrt_profiles.tensors import TensorSpec

TEXTS = (
    "The river rose three feet overnight. By morning the lower meadow was a lake, and the sheep had been moved to the "
    "barn behind Mr. Havel's house; nobody could say when the road to town would open again.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\n"
    "def variance(values):\n    m = mean(values)\n    return mean([(v - m) ** 2 for v in values])\n",
    "Question: A train leaves at 9:40 and arrives at 12:05. How long is the trip?\nAnswer: From 9:40 to 12:00 is "
    "2 hours 20 minutes, plus 5 minutes: 2 hours 25 minutes.",
    "今天天气很好，我们去公园散步吧。 The word for 'park' is 公园 (gōngyuán). 🌳",
)  # fmt: skip
Round = Callable[[NDArray[np.float32]], NDArray[np.float32]]  # what a graph does to the values of a weight
_LENGTH = 96  # tokens per text
_BEYOND_WINDOW = 32  # tokens by which the first text is longer than a sliding window


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a precision may cost: mean KL in nats, and where they are bounded, top-1 agreement and logit difference."""

    mean_kl: float
    top1_agreement: float = 0.0
    max_abs_diff: float = float("inf")


# Where rounded weights are the source's too, and products in fp32: what rounding the model's own constants may cost
STRUCTURE_BOUNDS: dict[FloatName, Bounds] = {
    "float32": Bounds(mean_kl=1e-6, top1_agreement=0.99, max_abs_diff=5e-3),
    "float16": Bounds(mean_kl=1e-6, top1_agreement=0.99, max_abs_diff=2e-2),
    "bfloat16": Bounds(mean_kl=1e-4, top1_agreement=0.97, max_abs_diff=0.2),
}
BOUNDS: dict[Precision, Bounds] = {
    "fp32": STRUCTURE_BOUNDS["float32"],
    "fp16": Bounds(mean_kl=1e-4, top1_agreement=0.97),
    "bf16": Bounds(mean_kl=1e-2, top1_agreement=0.9),
    "int8": Bounds(mean_kl=0.05),
    "int4": Bounds(mean_kl=1.0),
}


def reference_tokens(tokenizer: Any, profile: Profile, *, window: int | None = None) -> list[list[int]]:
    """Return the token ids of the parity texts, none longer than the capacity; the first is longer than `window`."""
    texts = [tokenizer.encode(text) for text in TEXTS]
    longest = max(_LENGTH, 0 if window is None else window + _BEYOND_WINDOW)
    if longest > _LENGTH:
        texts[0] = (texts[0] * (1 + longest // max(1, len(texts[0]))))[:longest]
    return [ids[: min(longest, profile.capacity)] for ids in texts if len(ids) > 1]


def most_rows(profile: Profile, *, window: int | None = None) -> int:
    """Return how many rows of logits the parity texts have at most."""
    first = _LENGTH if window is None else max(_LENGTH, min(window + _BEYOND_WINDOW, profile.capacity))
    return first + (len(TEXTS) - 1) * _LENGTH


def source_logits(
    model: nn.Module, texts: Sequence[Sequence[int]], rounding: Mapping[str, Round] | None = None
) -> list[NDArray[np.float32]]:
    """Return the source model's logits [n, V] per text, computed in fp32 whatever type its weights are stored in.

    rounding: what the graph does to weights, by parameter name; the model then computes with weights so rounded.
    """
    rows = []
    with torch.no_grad(), as_fp32(model, rounding):
        for ids in texts:
            out = model(input_ids=torch.tensor([ids]), use_cache=False)
            rows.append(out.logits[0].float().numpy())
    return rows


class Runner(Protocol):
    """Runs a decoder in calls of any width."""

    def __call__(self, token_ids: Sequence[int], start: int, width: int) -> NDArray[np.float32]:
        """Feed tokens from `start` on, padded to `width`; return their logits [n, V]."""
        ...


class GraphRunner:
    """Runs an exported graph in calls of any width, KV buffers bound in place; serves parity and exactness.

    as_written: without ONNX Runtime's own rewriting, which may bring integer products where the graph has none.
    """

    def __init__(
        self, path: Path, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], profile: Profile, *,
        as_written: bool = False,
    ) -> None:  # fmt: skip
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        if as_written:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        kv = [
            ort.OrtValue.ortvalue_from_numpy(np.zeros([int(d) for d in spec.shape], spec.dtype))
            for spec in inputs
            if "past" in spec.name
        ]
        self._past = list(zip((spec.name for spec in inputs if "past" in spec.name), kv, strict=True))
        self._present = list(zip((spec.name for spec in outputs if "present" in spec.name), kv, strict=True))
        self._given = [spec.name for spec in outputs if "present" not in spec.name]
        self._last = profile.capacity - 1
        self._names = {spec.name for spec in inputs}

    def __call__(
        self, token_ids: Sequence[int], start: int, width: int, others: Mapping[str, NDArray[Any]] | None = None
    ) -> NDArray[np.float32]:
        """Feed tokens from `start` on, padded to `width`, and other inputs; return logits [len(token_ids), V]."""
        logits: NDArray[np.float32] = self.run(token_ids, start, width, others)["logits"][0, : len(token_ids)]
        return logits

    def run(
        self, token_ids: Sequence[int], start: int, width: int, others: Mapping[str, NDArray[Any]] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Do the same; return all outputs but the KV buffers."""
        ids = np.zeros((1, width), np.int64)
        ids[0, : len(token_ids)] = token_ids
        binding = self._session.io_binding()
        call = {
            "input_ids": ids,
            "position_ids": np.minimum(np.arange(start, start + width)[None], self._last),
            "seqlens_k": np.array([start + width - 1], np.int32),
            "total_sequence_length": np.array(start + width, np.int32),
            "write_indices": np.array([start]),
            "tree_mask": np.tri(width, dtype=np.bool_)[None],
            "logits_indices": np.arange(width),
            **(others or {}),
        }
        for name in call.keys() & self._names:
            binding.bind_cpu_input(name, call[name])
        for name, value in self._past:
            binding.bind_ortvalue_input(name, value)
        for name in self._given:
            binding.bind_output(name)
        for name, value in self._present:
            binding.bind_ortvalue_output(name, value)
        try:
            self._session.run_with_iobinding(binding)
        except RuntimeError as error:
            raise ExportError(
                f"ONNX Runtime cannot run the graph: {str(error).strip().splitlines()[0][:200]}"
            ) from None
        return {name: value.numpy() for name, value in zip(self._given, binding.get_outputs(), strict=False)}


def graph_logits(runner: Runner, ids: Sequence[int], profile: Profile) -> NDArray[np.float32]:
    """Return the graph's logits [n, V] over prefill and verify calls of every width, with a rollback before each."""
    rng = np.random.default_rng(0)
    start = min(profile.prefill_width, max(1, len(ids) // 3))
    rows = [runner(ids[:start], 0, profile.prefill_width)]
    widths = profile.verify_widths
    while start < len(ids):
        width = widths[len(rows) % len(widths)]
        rejected = rng.choice(np.asarray(ids), width).tolist()
        runner(rejected, start, width)
        piece = ids[start : start + width]
        rows.append(runner(piece, start, width))
        start += len(piece)
    return np.concatenate(rows)


def compare(
    source: Sequence[NDArray[np.float32]], graph: Sequence[NDArray[np.float32]], texts: Sequence[Sequence[int]]
) -> Parity:
    """Measure the distance between two sets of logits [n, V] over texts of n tokens, row by row, in float64."""
    if not all(np.isfinite(rows).all() for rows in graph):
        raise ExportError("the graph gives logits that are not numbers")
    diffs, kls, same = [], [], []
    likelihoods: list[tuple[float, float]] = []  # of the next token: source, graph
    following = (token for ids in texts for token in (*ids[1:], None))
    rows = zip((r for t in source for r in t), (r for t in graph for r in t), following, strict=True)
    for theirs, ours, token in rows:
        log_p, log_q = _log_softmax(theirs), _log_softmax(ours)
        diffs.append(float(np.abs(ours - theirs).max()))
        kls.append(max(0.0, float(np.exp(log_p) @ (log_p - log_q))))
        same.append(int(ours.argmax()) == int(theirs.argmax()))
        if token is not None:
            likelihoods.append((log_p[token], log_q[token]))
    source_perplexity, perplexity = np.exp(-np.mean(likelihoods, axis=0)).tolist() if likelihoods else (1.0, 1.0)
    return Parity(
        num_rows=len(same),
        max_abs_diff=max(diffs),
        mean_kl=sum(kls) / len(kls),
        max_kl=max(kls),
        top1_agreement=sum(same) / len(same),
        perplexity=perplexity,
        source_perplexity=source_perplexity,
    )


def check(parity: Parity, bounds: Bounds, what: str, *, option: str = "") -> None:
    """Raise `ExportError` when the distance is beyond its bounds; option: of the command, that chose how to round."""
    problems = []
    if not parity.mean_kl <= bounds.mean_kl:
        problems.append(f"mean KL {parity.mean_kl:.3g} (at most {bounds.mean_kl:g})")
    if parity.top1_agreement < bounds.top1_agreement:
        problems.append(f"top-1 agreement {parity.top1_agreement:.3f} (at least {bounds.top1_agreement:g})")
    if not parity.max_abs_diff <= bounds.max_abs_diff:
        problems.append(f"largest logit difference {parity.max_abs_diff:.3g} (at most {bounds.max_abs_diff:g})")
    if problems:
        advice = f": choose another {option}" if option else ""
        raise ExportError(f"{what} does not match its source: {', '.join(problems)}{advice}")


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


@contextlib.contextmanager
def as_fp32(model: nn.Module, rounding: Mapping[str, Round] | None = None) -> Iterator[None]:
    """Give every module its own weights in fp32, rounded, while it runs: one module's worth of extra memory."""
    kept: dict[nn.Parameter, torch.Tensor] = {}
    rounds = _rounds(model, rounding or {})

    def widen(module: nn.Module, _: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            function = rounds.get((module, name))
            if parameter.dtype != torch.float32 or function is not None:
                kept[parameter] = parameter.data
                parameter.data = parameter.data.float()
            if function is not None:
                parameter.data = torch.from_numpy(function(parameter.data.numpy()))

    def restore(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in kept:
                parameter.data = kept.pop(parameter)

    hooks = [
        hook for m in model.modules() for hook in (m.register_forward_pre_hook(widen), m.register_forward_hook(restore))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounds(model: nn.Module, rounding: Mapping[str, Round]) -> dict[tuple[nn.Module, str], Round]:
    """Return the rounding of each module's own parameters; one without any has that of what it is tied to."""
    named = dict(model.named_parameters(remove_duplicate=False))
    shared = {named[name]: function for name, function in rounding.items()}
    return {
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]): rounding.get(name) or shared[parameter]
        for name, parameter in named.items()
        if parameter in shared
    }
