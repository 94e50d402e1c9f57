"""Detokenizing token by token: the pieces joined are the text, and none ends in half a character."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from specrt.text import Tokenizer
from specrt_profiles.manifest import Vocabulary, read_manifest

HALF = "\ufffd"
TEXTS = (
    "the quick brown fox jumps",
    "  leading and trailing  ",
    "naïve café déjà vu",
    "你好，世界。日本語のテキスト 한국어",
    "🙂👩‍👩‍👧‍👦🇨🇭 flags",
    "A\u0301e\u0308 combining \u0327\u0301 marks",
    "مرحبا بالعالم",
    "mixed 你 a 🙂 b é",
    "a \ufffd b",
    "<|user|>special<|end|> tokens<|assistant|>",
    "\x00\n\r\t",
)
NO_SPECIAL = Vocabulary(num_tokens=0, fingerprint="", eos_token_ids=(), special_tokens={})
LLAMA = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
METASPACE = (decoders.ByteFallback(), decoders.Metaspace())


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    """Return the text of each push, and of the flush at the end."""
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.fixture
def tokenizer(tiny_artifact: Path) -> Tokenizer:
    return Tokenizer(tiny_artifact, read_manifest(tiny_artifact).vocabulary, has_template=True)


def sentencepiece(folder: Path, decoder: Sequence[decoders.Decoder]) -> Tokenizer:
    """Return a tokenizer with word beginnings marked by ▁ and a token for every byte."""
    words = ["<unk>", "<s>", "▁the", "▁fox", "▁", "t", "h", "e", "f", "o", "x", ".", "s"]
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(list(decoder))
    backend.add_special_tokens(["<s>"])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder, NO_SPECIAL, has_template=False)


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_joined_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if HALF not in text:
        assert not any(HALF in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_before_it_changes_nothing(tokenizer: Tokenizer, text: str) -> None:
    prompt, ids = tokenizer.encode("<|user|>a question<|assistant|>"), tokenizer.encode(text)
    assert "".join(pieces_of(tokenizer, ids, prompt)) == tokenizer.decode(ids)


def test_text_is_given_out_as_soon_as_it_is_certain(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox <|end|>sat")
    assert pieces_of(tokenizer, ids) == [*(tokenizer.decode([token]) for token in ids), ""]


def test_a_character_is_given_out_with_its_last_byte(tokenizer: Tokenizer) -> None:
    bytes_of_a_star = byte_ids(tokenizer, "⭐".encode())
    assert pieces_of(tokenizer, bytes_of_a_star) == ["", "", "⭐", ""]


def test_a_text_that_ends_in_half_a_character_says_so_at_the_end(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "a🙂".encode()[:-1])
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", HALF]


def test_invalid_bytes_are_given_out_when_something_follows(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"a\xff\xfeb")
    assert pieces_of(tokenizer, ids) == ["a", "", "", f"{HALF}{HALF}b", ""]


def test_what_is_certain_before_half_a_character_does_not_wait(tokenizer: Tokenizer) -> None:
    assert pieces_of(tokenizer, byte_ids(tokenizer, b"\xff\xe2x"))[:2] == ["", ""]
    detokenizer = tokenizer.detokenizer(())
    pieces = [detokenizer.push(token) for token in byte_ids(tokenizer, b"\xff" * 40)]
    assert len("".join(pieces)) >= 20, "a long run of invalid bytes is held back for ever"


@pytest.mark.parametrize("lead", range(20))
def test_a_character_after_many_invalid_bytes_is_whole(tokenizer: Tokenizer, lead: int) -> None:
    ids = byte_ids(tokenizer, b"\xff" * lead + "🙂x".encode())
    assert "".join(pieces_of(tokenizer, ids)) == HALF * lead + "🙂x"


def test_any_tokens_in_any_order_give_the_text_of_the_whole(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    halves = [token for token in range(384) if tokenizer.decode([token]) == HALF]
    assert len(halves) > 100
    for _ in range(1500):
        pool = rng.choice([range(384), halves, [*halves, *range(10), *range(300, 384)]])
        ids = rng.choices(pool, k=rng.randint(1, 60))
        pieces = pieces_of(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids), ids
        whole = tokenizer.decode(ids)
        given = ""
        for piece in pieces:
            given += piece
            assert whole.startswith(given), ids


def test_many_tokens_without_text_do_not_fill_the_window(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("the"), *[0] * 500, *tokenizer.encode(" fox")]
    detokenizer = tokenizer.detokenizer(())
    text = "".join(detokenizer.push(token) for token in ids)
    assert text == "the fox"
    assert len(detokenizer._ids) < 50


@pytest.mark.parametrize("decoder", [LLAMA, METASPACE], ids=["llama", "metaspace"])
def test_the_space_after_a_prompt_is_kept(tmp_path: Path, decoder: Sequence[decoders.Decoder]) -> None:
    tokenizer = sentencepiece(tmp_path, decoder)
    the, fox = 2, 3
    assert tokenizer.decode([the, fox]) == "the fox"
    assert pieces_of(tokenizer, [fox, the], [the]) == [" fox", " the", ""]
    assert pieces_of(tokenizer, [the, fox]) == ["the", " fox", ""]


@pytest.mark.parametrize("decoder", [LLAMA, METASPACE], ids=["llama", "metaspace"])
@pytest.mark.parametrize("text", ["the fox 你好 the 🙂🙂 fox.", "é the", "fox 🙂", "  the", "the 🙂🙂🙂你🙂 fox"])
def test_characters_in_byte_tokens_come_out_whole(
    tmp_path: Path, decoder: Sequence[decoders.Decoder], text: str
) -> None:
    tokenizer = sentencepiece(tmp_path, decoder)
    ids = tokenizer.encode(text)
    for split in range(len(ids)):
        prompt, output = ids[:split], ids[split:]
        if HALF in tokenizer.decode(prompt):
            continue
        pieces = pieces_of(tokenizer, output, prompt)
        assert tokenizer.decode(prompt) + "".join(pieces) == tokenizer.decode(ids)
        assert not any(HALF in piece for piece in pieces)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return the token of each byte."""
    shown = {}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [tokenizer._backend.token_to_id(shown[byte]) for byte in data]
