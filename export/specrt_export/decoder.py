"""Trace a transformers decoder with its attention and cache replaced by the dialect's operators.

The model's own code runs unchanged but for four things: attention comes from the dialect, the cache hands keys and
values through (the attention operator stores them), rotary embeddings are read from tables, and the output matrix
sees only the rows that are asked for. What is traced is a skeleton without weights: what cannot be traced is known
before any weight is read, and no second copy of the weights is ever needed.
"""

import abc
import contextlib
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import onnx_ir as ir
import torch
import torch.onnx
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from specrt_export.errors import ExportError, UnsupportedModelError
from specrt_export.rotary import Rotary, RotaryTable
from specrt_profiles.profile import Profile
from specrt_profiles.tensors import DecoderDims, TensorSpec

OPSET = 23
_ATTENTION = "specrt"
_ROTATE = "apply_rotary_pos_emb"
_Pair = tuple[torch.Tensor, torch.Tensor]
Contract = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]  # inputs, outputs


@dataclass(slots=True)
class Call:
    """Inputs of the call by name, and KV buffers; the dialect's attention leaves each layer's new ones in `present`.

    features: what modules that are watched were given, in the order of the watching.
    """

    inputs: Mapping[str, torch.Tensor]
    past: list[_Pair]
    present: dict[int, _Pair] = field(default_factory=dict)
    rotary: Rotary | None = None
    rotated: _Pair | None = None
    features: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Per-layer attention settings: score scale, sliding window in tokens, logit soft cap, rotation to apply."""

    scale: float
    window: int | None
    softcap: float | None
    rotary: Rotary | None


class Dialect(Protocol):
    """Emits one layer's attention in the target operators."""

    def attention(
        self, call: Call, layer: int, qkv: tuple[torch.Tensor, ...], options: AttentionOptions
    ) -> torch.Tensor:
        """Return [B, W, H, D] for query [B, H, W, D], key and value [B, H_kv, W, D]; store `call.present[layer]`."""
        ...


def trace_as(
    make: Callable[[], "Wrapper"], contract: Contract, dims: DecoderDims, profile: Profile, dialect: Dialect
) -> ir.Model:  # fmt: skip
    """Return the graph of what `make` returns, with the inputs and outputs of `contract`.

    Its initializers that are weights or buffers of the model hold placeholders under the names of `weights_of`. Raises
    `UnsupportedModelError` for a model whose attention the dialect cannot do, `ExportError` with torch's reason when
    the model cannot be traced.
    """
    try:
        return _trace(make(), contract, dims, profile, dialect, fuse_rotation=True)
    except _RotationIsNotLastError:  # then the model has to rotate by itself
        return _trace(make(), contract, dims, profile, dialect, fuse_rotation=False)


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return a model's decoder layers."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps its layers in a way that heads are not made for, nor early exits"
        )
    return layers


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters and floating-point buffers under all their names in a traced graph."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {f"decoder.{name}": tensor.data for name, tensor in named if tensor.is_floating_point()}


def cache_argument(model: nn.Module) -> str:
    """Return the name of the argument that takes the cache: transformers renamed it; either release works."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class _RotationIsNotLastError(Exception):
    """Something happens to query or key between rotation and attention."""


def _trace(
    wrapper: "Wrapper", contract: Contract, dims: DecoderDims, profile: Profile, dialect: Dialect, *,
    fuse_rotation: bool,
) -> ir.Model:  # fmt: skip
    model = wrapper.attending
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet())
        try:
            stack.enter_context(_replaced(model, wrapper, dims, profile, dialect, fuse_rotation))
            return export_program(wrapper, *contract).model
        except Exception as error:
            ours = (UnsupportedModelError, _RotationIsNotLastError)
            for cause in (error, error.__cause__, error.__context__):  # torch wraps what is raised while it traces
                if isinstance(cause, ours):
                    raise cause from None
            reason = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0][:200]
            raise ExportError(f"torch could not trace {type(wrapper.decoder).__name__}: {reason}") from error


class PassThrough(Cache):  # type: ignore[misc]
    """A cache that returns what it is given: the attention operator does the storing."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> _Pair:
        """Return what it is given."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0."""
        return 0


class Wrapper(nn.Module, abc.ABC):
    """Gives a model the contract's inputs and outputs."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder
        self.call: Call | None = None

    @property
    def attending(self) -> nn.Module:
        """The part whose attention is replaced."""
        return self.decoder

    def forward(self, call: dict[str, torch.Tensor], past: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return all outputs."""
        self.call = Call(call, list(zip(past[::2], past[1::2], strict=True)))
        out = self.compute(self.call)
        present = [self.call.present[layer] for layer in range(len(self.call.past))]
        return (*out, *(tensor for pair in present for tensor in pair))

    @abc.abstractmethod
    def compute(self, call: Call) -> tuple[torch.Tensor, ...]:
        """Return the outputs but for the KV buffers."""


def export_program(
    wrapper: nn.Module, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> torch.onnx.ONNXProgram:  # fmt: skip
    """Export a wrapper with the inputs and outputs of a contract, whose dimensions with names stay open."""
    sizes = {"width": 8, "rows": 4, "new": 5, "own": 3}
    symbols = {name: torch.export.Dim(name, min=int(name == "width"), max=1 << 20) for name in sizes}
    args, dynamic = {}, {}
    for spec in inputs:
        shape = [sizes[d] if isinstance(d, str) else d for d in spec.shape]
        args[spec.name] = torch.zeros(shape, dtype=getattr(torch, spec.dtype))
        dynamic[spec.name] = {axis: symbols[d] for axis, d in enumerate(spec.shape) if isinstance(d, str)} or None
    kv = [spec.name for spec in inputs if spec.name.startswith("past_")]
    with torch.no_grad():
        program = torch.onnx.export(
            wrapper.eval(), _call_and_past(args, kv), dynamo=True, optimize=False, verbose=False, opset_version=OPSET,
            input_names=[spec.name for spec in inputs], output_names=[spec.name for spec in outputs],
            dynamic_shapes=_call_and_past(dynamic, kv),
        )  # fmt: skip
    assert program is not None
    return program


def _call_and_past(named: Mapping[str, Any], kv: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """Arrange what belongs to the inputs as the wrapper takes them."""
    return {name: value for name, value in named.items() if name not in kv}, [named[name] for name in kv]


@contextlib.contextmanager
def _replaced(
    model: Any, wrapper: Wrapper, dims: DecoderDims, profile: Profile, dialect: Dialect, fuse_rotation: bool
) -> Iterator[None]:
    """Swap attention and rotary modules; put back what belongs to transformers."""
    with contextlib.ExitStack() as stack:
        tables = _swap_rotary(model, dims, profile)
        for module in _modeling_modules(model):
            original = vars(module)[_ROTATE]
            vars(module)[_ROTATE] = _rotation(original, tables if fuse_rotation else [], wrapper, dims)
            stack.callback(vars(module).__setitem__, _ROTATE, original)
        AttentionInterface.register(_ATTENTION, _attention(wrapper, dialect))
        stack.callback(AttentionInterface._global_mapping.pop, _ATTENTION)
        model.set_attn_implementation(_ATTENTION)
        yield


def _swap_rotary(model: nn.Module, dims: DecoderDims, profile: Profile) -> list[RotaryTable]:
    apply = next((vars(m)[_ROTATE] for m in _modeling_modules(model)), None)
    tables: list[RotaryTable] = []
    for name, module in list(model.named_modules()):
        if apply is None or not type(module).__name__.endswith("RotaryEmbedding"):
            continue
        table = RotaryTable(
            module, apply, capacity=profile.capacity, slots=profile.slots, head_dim=dims.head_dim,
            dtype=getattr(torch, profile.float_type),
        )  # fmt: skip
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, table)
        tables.append(table)
    return tables


def _modeling_modules(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules of the model's layers that define a rotation function."""
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in sorted(names) if _ROTATE in vars(sys.modules[name])]


def _rotation(original: Any, tables: list[RotaryTable], wrapper: Wrapper, dims: DecoderDims) -> Any:
    def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, *args: Any, **kwargs: Any) -> _Pair:
        found = next((rotary for table in tables if (rotary := table.rotary(cos)) is not None), None)
        if found is None or query.shape[-1] != dims.head_dim:
            rotated: _Pair = original(query, key, cos, *args, **kwargs)
            return rotated
        assert wrapper.call is not None
        wrapper.call.rotary, wrapper.call.rotated = found, (query, key)  # the layer's attention rotates
        return query, key

    return rotate


def _attention(wrapper: Wrapper, dialect: Dialect) -> Any:
    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
        scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
        s_aux: torch.Tensor | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        if s_aux is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} cannot be exported: its attention sinks are not supported"
            )
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(f"{type(module).__name__} cannot be exported: its attention is not causal")
        call = wrapper.call
        assert call is not None
        if call.rotated is not None and (query is not call.rotated[0] or key is not call.rotated[1]):
            raise _RotationIsNotLastError
        options = AttentionOptions(
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=sliding_window, softcap=softcap, rotary=call.rotary,
        )  # fmt: skip
        call.rotary = call.rotated = None
        return dialect.attention(call, module.layer_idx, (query, key, value), options), None

    return attention


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's remarks about itself; errors still come as exceptions."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.onnx._internal.exporter", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
