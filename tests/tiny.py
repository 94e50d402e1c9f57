"""Small random-weight models of many families with a real byte-level tokenizer, and their artifacts."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specrt_profiles.profile import Profile

VOCAB_SIZE = 384
TINY_PROFILE = Profile(name="tiny", capacity=128, prefill_width=16, num_draft_tokens=3)
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and runs away from the river bank",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "naïve café 你好 世界 🙂 déjà vu",
] * 4
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": 0,
}
_LONG = {**_SMALL, "max_position_embeddings": 512}
_GROUPED = {**_LONG, "num_key_value_heads": 2}
_LLAMA = {**_GROUPED, "head_dim": 16}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_WINDOW = {**_LLAMA, "sliding_window": 24}
_BOTH_KINDS = ["sliding_attention", "full_attention"]  # one layer of each: most of an export's time is per layer
_PHI3 = {**_GROUPED, "original_max_position_embeddings": 512}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_OPT = {**_LONG, "ffn_dim": 96, "word_embed_proj_dim": 64}

# family -> (configuration class, its settings); all are in the documentation's list of models that were tried
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", _LLAMA),
    "llama-3-rope": ("LlamaConfig", {**_LLAMA, "rope_scaling": _LLAMA3_ROPE}),
    "llama-biased": ("LlamaConfig", {**_LLAMA, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", _LLAMA),
    "mistral": ("MistralConfig", {**_LLAMA, "sliding_window": None}),
    "mistral-window": ("MistralConfig", _WINDOW),
    "gemma": ("GemmaConfig", {**_LLAMA, "num_key_value_heads": 1, "head_dim": 32}),
    "gemma2": ("Gemma2Config", {**_WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", {**_WINDOW, "query_pre_attn_scalar": 16, "layer_types": _BOTH_KINDS}),
    "smollm3": ("SmolLM3Config", {**_GROUPED, "no_rope_layer_interval": 2}),  # the second layer does not rotate
    "phi3": ("Phi3Config", _PHI3),
    "phi3-partial": ("Phi3Config", {**_PHI3, "head_dim": 32, "rope_parameters": _PARTIAL}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": VOCAB_SIZE}),
    "phi": ("PhiConfig", {**_LONG, "num_key_value_heads": 4}),
    "gpt-neox": ("GPTNeoXConfig", _LONG),
    "cohere": ("CohereConfig", _GROUPED),
    "glm": ("GlmConfig", _LLAMA),
    "olmo2": ("Olmo2Config", _GROUPED),
    "granite": ("GraniteConfig", _GROUPED),
    "starcoder2": ("Starcoder2Config", {**_GROUPED, "sliding_window": None}),
    "opt": ("OPTConfig", _OPT),
    "hunyuan": ("HunYuanDenseV1Config", _LLAMA),
}


def profile(**changes: object) -> Profile:
    """Return the tiny profile with other values."""
    return replace(TINY_PROFILE, **changes)  # type: ignore[arg-type]


def make_tokenizer(folder: Path, *, extra: tuple[str, ...] = ()) -> None:
    """Save a trained byte-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=[*SPECIAL, *extra], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)


def make_model(family: str, folder: Path, *, seed: int = 0, dtype: str = "float32", **overrides: object) -> Path:
    """Save a random-weight model of a family with its tokenizer."""
    import torch
    import transformers

    name, settings = FAMILIES[family]
    config = getattr(transformers, name)(**{**settings, "eos_token_id": 0, "bos_token_id": None, **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # larger weights than the default, so that logits differ enough to be worth comparing
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_shell(folder: Path, config: object, *, weights: bool = True) -> Path:
    """Write what a model is judged by before any weight is read: its configuration and a file of weights.

    `config` is a transformers configuration or the content of config.json.
    """
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    if isinstance(config, dict):
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
    else:
        config.save_pretrained(folder)  # type: ignore[attr-defined]
    if weights:
        save_file({"weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    return folder


def make_gguf(path: Path, *, seed: int = 0, pre: str = "default") -> Path:
    """Save a random-weight Llama with its tokenizer and chat template as one GGUF file."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), "llama")
    writer.add_name("Tiny")
    writer.add_license("apache-2.0")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    num_tokens = _add_gguf_tokenizer(writer, path.parent / "tokenizer", pre)
    rng = np.random.default_rng(seed)
    matrices = {"token_embd": (num_tokens, 64), "output": (num_tokens, 64), "blk.0.attn_q": (64, 64)}
    matrices |= {"blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64), "blk.0.attn_output": (64, 64)}
    matrices |= {"blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64), "blk.0.ffn_down": (64, 96)}
    for name, shape in matrices.items():
        writer.add_tensor(f"{name}.weight", (0.2 * rng.standard_normal(shape)).astype(np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_gguf_tokenizer(writer: object, folder: Path, pre: str) -> int:
    from gguf import GGUFWriter, TokenType

    assert isinstance(writer, GGUFWriter)
    make_tokenizer(folder)
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    added = {token["content"]: token["id"] for token in data["added_tokens"]}
    ids = {**data["model"]["vocab"], **added}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in added else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in data["model"]["merges"]])
    writer.add_eos_token_id(added["<|end|>"])
    writer.add_chat_template(TEMPLATE)
    return len(tokens)


def export_tiny(
    source: Path | None, out: Path, *, draft: str = "ngram", profile: Profile = TINY_PROFILE, **request: object
) -> Path:
    """Export a small model silently; `request` sets more fields of the `ExportRequest`."""
    from specrt_export.artifact import ExportRequest, export
    from specrt_export.cli import default_cache_dir
    from specrt_export.progress import Progress

    wanted = {
        "model": None if source is None else str(source),
        "draft": draft,
        "profile": profile,
        "out": out,
        "cache_dir": default_cache_dir(),
    }
    return export(ExportRequest(**{**wanted, **request}), Progress(stream=io.StringIO()))  # type: ignore[arg-type]


def assert_lossless(artifact: Path, cache_dir: Path) -> None:
    """Compare k = 0 with k = 5 for every drafter, greedy and sampled; some proposals are accepted, some rejected."""
    import specrt

    num_proposed = num_accepted = 0
    with specrt.load(artifact, cache_dir=cache_dir) as model:
        for prompt in ([5, 9, 9, 5, 9, 9, 5], [17], list(range(40, 100))):
            for temperature in (0.0, 1.0):
                options = {"max_tokens": 30, "ignore_eos": True, "temperature": temperature, "seed": 3}
                plain = model.generate(prompt, k=0, **options)
                assert len(plain.token_ids) == 30
                for drafter in model.manifest.drafter_names:
                    result = model.generate(prompt, k=5, drafter=drafter, **options)
                    assert result.token_ids == plain.token_ids
                    num_proposed += result.stats.num_proposed
                    num_accepted += result.stats.num_accepted
    assert 0 < num_accepted < num_proposed


def make_head(source: Path, path: Path, layout: str, *, d2t: bool = True, own_matrix: bool = False) -> Path:
    """Save a random-weight head for a model under the names of published ones; without `d2t` it guesses all tokens."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from specrt_export.distill.card import published_name
    from specrt_export.distill.head import head_for

    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    head = head_for(model, layout, ffn=None, seed=1)  # type: ignore[arg-type]
    tensors = {
        published_name(layout, name): p.data.clone()  # type: ignore[arg-type]
        for name, p in head.named_parameters()
    }
    ids = torch.arange(0, VOCAB_SIZE, 2) if d2t else torch.arange(VOCAB_SIZE)
    if d2t:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.isin(torch.arange(VOCAB_SIZE), ids)
    if own_matrix:
        tensors["lm_head.weight"] = model.get_output_embeddings().weight.data[ids].clone()
    save_file(tensors, path)
    return path


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    """Return what leaves a tensor out of a head."""
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, Any]], None]:
    """Return what puts zeros in the place of a tensor of a head."""
    import torch

    return lambda tensors: tensors.__setitem__(name, torch.zeros(shape))


def make_medusa(
    source: Path, path: Path, *, vllm: bool = False, heads: int = 3, blocks: int = 1, matrices: int | None = None,
    d2t: bool = False, bias: bool = True, prefix: str = "", scale: float = 0.2,
) -> Path:  # fmt: skip
    """Save random-weight Medusa heads for a model under the names of published ones, or under those of vLLM.

    matrices: how many heads bring an output matrix, all if left out. d2t: guess every other token only. scale: of the
    blocks; without them and matrices all heads say once more what the target said last.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    size, generator = int(AutoConfig.from_pretrained(source).hidden_size), torch.Generator().manual_seed(1)
    ids = torch.arange(0, VOCAB_SIZE, 2) if d2t else torch.arange(VOCAB_SIZE)
    tensors: dict[str, torch.Tensor] = {}
    for head in range(heads):
        for block in range(blocks):
            name = f"blocks.{head}.layers.{block}" if vllm else f"{head}.{block}.linear"
            tensors[f"{name}.weight"] = scale * torch.randn(size, size, generator=generator)
            if bias:
                tensors[f"{name}.bias"] = scale * torch.randn(size, generator=generator)
        if matrices is None or head < matrices:
            name = f"lm_heads.{head}.weight" if vllm else f"{head}.{blocks}.weight"
            tensors[name] = 0.3 * torch.randn(len(ids), size, generator=generator)
    if d2t:
        tensors["token_map" if vllm else "d2t"] = ids if vllm else ids - torch.arange(len(ids))
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, path)
    return path
