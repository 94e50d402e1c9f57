"""The tokenizer that ships: saved from the source, and compared with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrt_export.checkpoint import Checkpoint
from specrt_export.errors import CheckpointError, ExportError
from specrt_profiles.manifest import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Vocabulary
from specrt_profiles.vocabulary import fingerprint, tokens_by_id

_BATTERY = (
    "", " ", "  two  spaces ", "\n\n\tline\r\n", "Hello, world!", "it's 3.14159 or 1,000,000?",
    "def f(x):\n    return x ** 2  # squared\n", '{"key": [1, 2, null]}', "naïve café, Ångström, ﬁne",
    "你好，世界。日本語のテキスト 한국어",
    "🙂👩‍👩‍👧‍👦🇨🇭 and \u200bzero width", "مرحبا بالعالم", "\u0000\u0001 control", "a" * 70, "A\u0301 versus Á",
)  # fmt: skip


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
    return tokenizer


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


def vocabulary_of(tokenizer: Any, generation_config: Any) -> Vocabulary:
    """Describe the tokenizer for the manifest."""
    tokens = tokens_of(tokenizer)
    eos = generation_config.eos_token_id
    if eos is None:
        eos = tokenizer.eos_token_id
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return Vocabulary(
        num_tokens=len(tokens),
        fingerprint=fingerprint(tokens),
        eos_token_ids=tuple(ids),
        special_tokens=named,
    )
