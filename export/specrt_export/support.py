"""Which models can be exported: decided from the configuration, before any weight is read."""

import re
from dataclasses import astuple
from typing import Any

from specrt_export.checkpoint import Checkpoint
from specrt_export.errors import CheckpointError, UnsupportedModelError
from specrt_profiles.profile import Profile
from specrt_profiles.tensors import DecoderDims

TASK = "text-generation"
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
_STATEFUL_LAYERS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "lightning", "gated_delta_net"}
_EXPERTS = re.compile(r"(moe_)?(num|n)_((local|routed)_)?experts")


def load_config(checkpoint: Checkpoint) -> Any:
    """Return the transformers configuration of a checkpoint."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(checkpoint.directory), **checkpoint.from_pretrained)
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, StrictDataclassError) as error:
        line = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{checkpoint.name}: transformers cannot read its configuration: {line}") from None


def model_class(config: Any) -> Any:
    """Return the transformers class that loads this configuration, if Optimum knows it as text generation."""
    import transformers
    from optimum.exporters.tasks import TasksManager
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = getattr(config, "architectures", None) or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)]
    cls = getattr(transformers, str(names[0]), None)
    try:
        task = TasksManager.infer_task_from_model(cls) if cls is not None else None
    except ValueError:
        task = None
    found = "an encoder-decoder model" if getattr(config, "is_encoder_decoder", False) else f"the task {task}"
    if task != TASK or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{names[0] or config.model_type}: expected a decoder-only text model, found {found}"
        )
    return cls


def check_supported(checkpoint: Checkpoint, config: Any, profile: Profile) -> DecoderDims:
    """Return the decoder's sizes, or raise `UnsupportedModelError` with the reason why it cannot be exported."""
    cls = model_class(config)
    what = f"{checkpoint.name} ({cls.__name__})"
    _refuse(what, _wrong_kind(cls, config))
    try:
        dims = decoder_dims(config)
    except (AttributeError, RuntimeError) as error:  # nested, or different from layer to layer
        line = " ".join(str(error).split())[:200]
        raise UnsupportedModelError(
            f"{what} cannot be exported: its configuration has no single size: {line}"
        ) from None
    _refuse(what, _wrong_size(config, dims, profile))
    return dims


def decoder_dims(config: Any) -> DecoderDims:
    """Read the decoder's sizes through Optimum's normalised configuration."""
    from optimum.utils import NormalizedConfigManager, NormalizedTextConfig

    try:
        normalized = NormalizedConfigManager.get_normalized_config_class(config.model_type)(config)
    except KeyError:
        normalized = NormalizedTextConfig(config)
    heads = normalized.num_attention_heads
    return DecoderDims(
        num_layers=normalized.num_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or normalized.hidden_size // max(1, heads),
        hidden_size=normalized.hidden_size,
        vocab_size=normalized.vocab_size,
    )


def load_model(checkpoint: Checkpoint) -> Any:
    """Load the source model through Optimum's TasksManager, in the type its weights are stored in.

    Raises `CheckpointError` when transformers cannot, or when a weight is missing (it would be drawn at random).
    """
    import torch
    from optimum.exporters.tasks import TasksManager

    dtype = torch.float32 if checkpoint.gguf_file else "auto"
    loader = TasksManager.get_model_class_for_task(TASK, framework="pt", library="transformers")
    try:
        model, report = loader.from_pretrained(
            str(checkpoint.directory), dtype=dtype, output_loading_info=True, **checkpoint.from_pretrained
        )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        line = str(error).strip().splitlines()[0][:200]
        raise CheckpointError(f"{checkpoint.name}: transformers cannot load it: {line}") from error
    if report["missing_keys"]:
        names = ", ".join(sorted(report["missing_keys"])[:3])
        raise CheckpointError(
            f"{checkpoint.name}: {len(report['missing_keys'])} weights are missing ({names}): download it again"
        )
    return model.eval()


def longest_context(config: Any) -> int | None:
    """Return the number of positions the model knows, or None if it does not say."""
    for name in ("max_position_embeddings", "n_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def narrow_window(config: Any, profile: Profile) -> int | None:
    """Return the sliding window in tokens if some layer has one narrower than the capacity."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or []
    used = "sliding_attention" in layers if layers else getattr(config, "use_sliding_window", True)
    return window if used and isinstance(window, int) and 0 < window < profile.capacity else None


def _refuse(what: str, reason: str | None) -> None:
    if reason:
        raise UnsupportedModelError(f"{what} cannot be exported: {reason}")


def _wrong_kind(cls: Any, config: Any) -> str | None:
    others = set(getattr(config, "layer_types", None) or []) - _ATTENTION_LAYERS
    kinds = ", ".join(sorted(others))
    if getattr(cls, "_is_stateful", False) or others & _STATEFUL_LAYERS:
        return f"its layers ({kinds or 'recurrent'}) keep state that cannot be rolled back"
    if others:
        return f"its layers ({kinds}) are neither full nor sliding attention"
    if _has_experts(config.to_dict()):
        return "it chooses experts per token (mixture of experts), which is not supported yet"
    if getattr(config, "kv_lora_rank", None):
        return "its attention keeps compressed keys and values (multi-head latent attention), not supported yet"
    if not getattr(cls, "_supports_attention_backend", False):
        return "transformers does not let its attention be replaced (no attention interface)"
    return None


def _has_experts(config: dict[str, Any]) -> bool:
    numbers = [value for key, value in config.items() if _EXPERTS.fullmatch(str(key)) and isinstance(value, int)]
    return any(number > 1 for number in numbers) or any(
        _has_experts(value) for value in config.values() if isinstance(value, dict)
    )


def _wrong_size(config: Any, dims: DecoderDims, profile: Profile) -> str | None:
    limit = longest_context(config)
    if min(astuple(dims)[:-1]) < 1:  # all but the features, which only targets of heads have
        return f"expected positive sizes, found {dims}"
    if dims.head_dim % 8:
        return f"its head size {dims.head_dim} is not a multiple of 8, which the attention operator needs"
    if dims.num_heads % dims.num_kv_heads:
        return f"its {dims.num_heads} query heads are not a multiple of its {dims.num_kv_heads} KV heads"
    if limit is not None and profile.capacity > limit:
        return (
            f"it knows {limit} positions, fewer than the capacity {profile.capacity}: choose --capacity {limit} or less"
        )
    return None
