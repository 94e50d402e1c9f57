"""Small random-weight models of many families, with a real byte-level tokenizer, as transformers directories."""

from pathlib import Path

VOCAB_SIZE = 384
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
    "gemma2": ("Gemma2Config", {**_WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {**_WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 6}),
    "smollm3": ("SmolLM3Config", {**_GROUPED, "num_hidden_layers": 4}),
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
}


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
