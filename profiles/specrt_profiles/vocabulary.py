"""Do two tokenizers mean the same by every token id, and which tokens can a head guess?"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specrt_profiles.errors import ManifestError, VocabularyError


def tokens_by_id(vocabulary: Mapping[str, int]) -> list[str | None]:
    """Return the token of every id (None for gaps) from a token -> id mapping with the added tokens in it."""
    tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        tokens[index] = token
    return tokens


def fingerprint(tokens: list[str | None]) -> str:
    """Return a SHA-256 over every token's id and content."""
    digest = hashlib.sha256()
    for index, token in enumerate(tokens):
        if token is not None:
            digest.update(f"{index}\0{token}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def check_draft_vocabulary(target: list[str | None], draft: list[str | None], *, draft_rows: int) -> None:
    """Raise `VocabularyError` unless a draft with `draft_rows` embedding rows can follow and guess the target's tokens.

    Ids that both know must have the same content. A draft may have more tokens (they are never proposed) or
    fewer, as long as its embedding has a row for each of the target's ids; padded rows need no content.
    """
    for index, (ours, theirs) in enumerate(zip(target, draft, strict=False)):
        if ours is not None and theirs is not None and ours != theirs:
            raise VocabularyError(
                f"the draft has another vocabulary: token {index} is {theirs!r} in the draft and {ours!r} in the "
                "target: choose a draft that shares the target's tokenizer"
            )
    if draft_rows < len(target):
        raise VocabularyError(
            f"the draft has another vocabulary: {draft_rows} embedding rows for the target's {len(target)} tokens: "
            "choose a draft that shares the target's tokenizer"
        )


def read_token_ids(path: Path, *, size: int, vocab_size: int) -> NDArray[np.int64]:
    """Return the ids of a head's rows [size], all different; raises `ManifestError` for a file that has others."""
    try:
        ids = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ManifestError(f"{path}: not readable as token ids ({error}): copy the artifact again") from None
    whole = isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.shape == (size,)
    if not whole or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size or len(np.unique(ids)) < size:
        raise ManifestError(f"{path}: expected {size} different token ids below {vocab_size}: copy the artifact again")
    found: NDArray[np.int64] = ids
    return found
