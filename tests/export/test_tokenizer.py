"""The tokenizer that ships is the source's, and a changed one is noticed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import tiny
from specrt_export import tokenizer as module
from specrt_export.checkpoint import Checkpoint, resolve
from specrt_export.errors import CheckpointError, ExportError, UnsupportedModelError
from specrt_export.tokenizer import compare_tokenizers, load_tokenizer, save_tokenizer, tokens_of, vocabulary_of
from specrt_profiles.vocabulary import fingerprint, tokens_by_id


@pytest.fixture
def source(tmp_path: Path) -> Any:
    tiny.make_tokenizer(tmp_path / "source")
    return AutoTokenizer.from_pretrained(tmp_path / "source")


def save(source: Any, folder: Path) -> Tokenizer:
    folder.mkdir()
    save_tokenizer(source, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_the_saved_tokenizer_equals_the_source_on_the_battery(source: Any, tmp_path: Path) -> None:
    shipped = save(source, tmp_path / "out")
    compare_tokenizers(source, shipped)
    for text in module._BATTERY:
        assert shipped.encode(text).ids == source.encode(text)
        assert shipped.decode(shipped.encode(text).ids) == text


def test_the_shipped_vocabulary_is_the_sources(source: Any, tmp_path: Path) -> None:
    shipped = save(source, tmp_path / "out")
    assert tokens_by_id(shipped.get_vocab(with_added_tokens=True)) == tokens_of(source)


def lowercase(shipped: Tokenizer) -> None:
    shipped.normalizer = normalizers.Lowercase()


def compose(shipped: Tokenizer) -> None:
    shipped.normalizer = normalizers.NFC()


def strip(shipped: Tokenizer) -> None:
    shipped.normalizer = normalizers.Strip()


def prefix_space(shipped: Tokenizer) -> None:
    shipped.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def no_decoder(shipped: Tokenizer) -> None:
    shipped.decoder = decoders.Fuse()


def add_end(shipped: Tokenizer) -> None:
    shipped.post_processor = TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", 0)])


def truncate(shipped: Tokenizer) -> None:
    shipped.enable_truncation(30)


def new_special_token(shipped: Tokenizer) -> None:
    shipped.add_special_tokens(["world"])


@pytest.mark.parametrize(
    "sabotage", [lowercase, compose, strip, prefix_space, no_decoder, add_end, truncate, new_special_token]
)
def test_a_changed_tokenizer_is_detected(source: Any, tmp_path: Path, sabotage: Callable[[Tokenizer], None]) -> None:
    shipped = save(source, tmp_path / "out")
    sabotage(shipped)
    with pytest.raises(ExportError, match="the saved tokenizer differs from the source's"):
        compare_tokenizers(source, shipped)


def test_a_special_token_that_became_plain_text_is_detected(source: Any, tmp_path: Path) -> None:
    save(source, tmp_path / "out")
    data = json.loads((tmp_path / "out" / "tokenizer.json").read_text("utf-8"))
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] != "<|end|>"]
    with pytest.raises(ExportError, match=r"<\|end\|>"):
        compare_tokenizers(source, Tokenizer.from_str(json.dumps(data)))


def test_a_damaged_file_is_noticed_while_it_is_saved(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Tokenizer.from_file

    def damaged(path: str) -> Tokenizer:
        shipped = real(path)
        lowercase(shipped)
        return shipped

    class Damaging:
        from_file = staticmethod(damaged)

    monkeypatch.setattr("tokenizers.Tokenizer", Damaging)
    with pytest.raises(ExportError, match="differs from the source's"):
        save_tokenizer(source, tmp_path)


def test_truncation_and_padding_of_the_source_do_not_ship(source: Any, tmp_path: Path) -> None:
    source.backend_tokenizer.enable_truncation(5)
    source.backend_tokenizer.enable_padding(length=64)
    shipped = save(source, tmp_path / "out")
    assert len(shipped.encode("a" * 70 + "b").ids) > 5
    assert len(shipped.encode("a").ids) == 1


def test_the_chat_template_is_written_as_it_is(source: Any, tmp_path: Path) -> None:
    save_tokenizer(source, tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text("utf-8") == tiny.TEMPLATE


def test_of_several_templates_the_default_one_is_written(source: Any, tmp_path: Path) -> None:
    source.chat_template = {"default": "A", "tool_use": "B"}
    save_tokenizer(source, tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text("utf-8") == "A"


@pytest.mark.parametrize("template", [None, "", {"tool_use": "B"}])
def test_without_a_template_none_is_written(source: Any, tmp_path: Path, template: object) -> None:
    source.chat_template = template
    save_tokenizer(source, tmp_path)
    assert not (tmp_path / "chat_template.jinja").exists()


@pytest.mark.parametrize("content", [None, "", "{", "{}", "[]"])
def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path, content: str | None) -> None:
    folder = tiny.make_shell(tmp_path / "model", {"model_type": "llama"})
    tiny.make_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content, "utf-8")
    checkpoint = resolve(str(folder), revision=None, cache_dir=tmp_path, on_bytes=lambda _: None)
    with pytest.raises(CheckpointError, match="its tokenizer cannot be read") as caught:
        load_tokenizer(checkpoint)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_tokenizer_json_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.make_shell(tmp_path / "model", {"model_type": "llama"})
    checkpoint = resolve(str(folder), revision=None, cache_dir=tmp_path, on_bytes=lambda _: None)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: object())
    with pytest.raises(CheckpointError, match=r"its tokenizer \(object\) has no tokenizer.json form"):
        load_tokenizer(checkpoint)


class Config:
    def __init__(self, eos: int | list[int] | None) -> None:
        self.eos_token_id = eos


@pytest.mark.parametrize(("eos", "ids"), [(7, (7,)), ([7, 2], (7, 2)), (None, (0,)), ([], ())])
def test_end_tokens_come_from_the_generation_config_or_the_tokenizer(
    source: Any, eos: int | list[int] | None, ids: tuple[int, ...]
) -> None:
    assert vocabulary_of(source, Config(eos), num_rows=340).eos_token_ids == ids


def test_the_vocabulary_is_described(source: Any) -> None:
    found = vocabulary_of(source, Config(None), num_rows=340)
    assert found.num_tokens == 340
    assert found.fingerprint == fingerprint(tokens_of(source))
    assert found.special_tokens == {"eos_token": "<|end|>"}


def test_end_tokens_without_logits_are_left_out(source: Any) -> None:
    assert vocabulary_of(source, Config([3, 340, 10**6]), num_rows=340).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("default", ["\u010a", "\u010a", "1"]), ("smollm", ["\u010a\u010a", "1"]), ("starcoder", ["\u010a\u010a", "1"])],
)
def test_a_gguf_file_splits_text_in_its_own_way(tmp_path: Path, kind: str, tokens: list[str]) -> None:
    """A digit set apart first leaves the newlines before it together; with GPT-2's pattern they are two words."""
    backend = load_tokenizer(gguf(tmp_path, kind)).backend_tokenizer
    words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("\n\n1")]
    assert words == tokens


def test_a_gguf_file_with_an_unknown_way_to_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="splits text in a way named 'poro-chat', which is not known here"):
        load_tokenizer(gguf(tmp_path, "poro-chat"))


def gguf(folder: Path, pre: str) -> Checkpoint:
    path = tiny.make_gguf(folder / "tiny.gguf", pre=pre)
    return resolve(str(path), revision=None, cache_dir=folder, on_bytes=lambda _: None)
