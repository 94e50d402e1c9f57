"""The tokenizer that ships: saved from the source, and compared with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrt_export.checkpoint import Checkpoint
from specrt_export.errors import CheckpointError, ExportError, UnsupportedModelError
from specrt_profiles.manifest import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Vocabulary
from specrt_profiles.vocabulary import fingerprint, tokens_by_id

_BATTERY = (
    "", " ", "  two  spaces ", "\n\n\tline\r\n", "Hello, world!", "it's 3.14159 or 1,000,000?",
    "def f(x):\n    return x ** 2  # squared\n", '{"key": [1, 2, null]}', "naïve café, Ångström, ﬁne",
    "你好，世界。日本語のテキスト 한국어",
    "Steps:\n\n1. Mix\n  2. Bake 12 min",
    "🙂👩‍👩‍👧‍👦🇨🇭 and \u200bzero width", "مرحبا بالعالم", "\u0000\u0001 control", "a" * 70, "A\u0301 versus Á",
)  # fmt: skip


# Values of tokenizer.ggml.pre, as llama.cpp understands them (llama-vocab.cpp): GPT-2's pattern, and the same after
# every digit has been set apart.
_LIKE_GPT2 = {None, "default", "gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais", "trillion"}
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Return the source's tokenizer, which must be one of the `tokenizers` library."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(checkpoint.directory), **checkpoint.from_pretrained)
    except (OSError, ValueError, KeyError, TypeError) as error:
        line = str(error).strip().splitlines()[0][:200]
        raise CheckpointError(f"{checkpoint.name}: its tokenizer cannot be read: {line}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise CheckpointError(
            f"{checkpoint.name}: its tokenizer ({type(tokenizer).__name__}) has no tokenizer.json form"
        )
    if checkpoint.gguf_file is not None:
        _set_gguf_splits(tokenizer, checkpoint)
    return tokenizer


def _set_gguf_splits(tokenizer: Any, checkpoint: Checkpoint) -> None:
    """Split text into words as `tokenizer.ggml.pre` says, where transformers would fall back to GPT-2's way."""
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    fields = GGUFReader(checkpoint.directory / str(checkpoint.gguf_file)).fields
    model, kind = (fields[key].contents() if (key := f"tokenizer.ggml.{name}") in fields else None
                   for name in ("model", "pre"))  # fmt: skip
    if model != "gpt2" or kind in GGUF_PRE_TOKENIZER_SPLITS or kind in _LIKE_GPT2:
        return
    if kind not in _SINGLE_DIGITS:
        raise UnsupportedModelError(
            f"{checkpoint.name}: its tokenizer splits text in a way named {kind!r}, which is not known here: export "
            "the model from its transformers directory"
        )
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write tokenizer.json and the chat template, and check the former against the source."""
    from tokenizers import Tokenizer

    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.save(str(folder / TOKENIZER_FILE))
    compare_tokenizers(tokenizer, Tokenizer.from_file(str(folder / TOKENIZER_FILE)))
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    if template:
        (folder / CHAT_TEMPLATE_FILE).write_text(template, "utf-8")


def compare_tokenizers(source: Any, shipped: Any) -> None:
    """Raise `ExportError` at the first text that the two encode or decode differently."""
    special = [token for token in source.all_special_tokens if token]
    battery = (*_BATTERY, *special, "".join(special), f"before{' '.join(special)}after")
    for text in battery:
        ids, ours = source.encode(text), shipped.encode(text).ids
        if ids != ours:
            raise ExportError(
                f"the saved tokenizer differs from the source's on {text!r}: {ours[:12]} instead of {ids[:12]}"
            )
        plain = source.backend_tokenizer.decode(ids, skip_special_tokens=True)
        if shipped.decode(ours, skip_special_tokens=True) != plain:
            raise ExportError(f"the saved tokenizer differs from the source's when it decodes {text!r}")


def tokens_of(tokenizer: Any) -> list[str | None]:
    """Return the token of every id."""
    return tokens_by_id(tokenizer.get_vocab())


def vocabulary_of(tokenizer: Any, generation_config: Any, *, num_rows: int) -> Vocabulary:
    """Describe the tokenizer for the manifest; end tokens that have none of the `num_rows` logits never come."""
    tokens = tokens_of(tokenizer)
    eos = generation_config.eos_token_id
    if eos is None:
        eos = tokenizer.eos_token_id
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return Vocabulary(
        num_tokens=len(tokens),
        fingerprint=fingerprint(tokens),
        eos_token_ids=tuple(token for token in ids if token < num_rows),
        special_tokens=named,
    )
