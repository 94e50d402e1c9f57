"""Do two tokenizers mean the same by every token id?"""

import hashlib
from collections.abc import Mapping

from specrt_profiles.errors import VocabularyError


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
