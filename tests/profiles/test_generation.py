"""generation.json: sampling defaults on disk."""

import json
from pathlib import Path
from typing import Any

import pytest

from specrt_profiles.errors import ManifestError
from specrt_profiles.generation import GENERATION_FILE, GenerationDefaults, read_generation, write_generation

FULL = GenerationDefaults(
    temperature=0.7,
    top_k=20,
    top_p=0.8,
    min_p=0.05,
    repetition_penalty=1.1,
    bad_words_ids=((1, 2), (3,)),
    min_tokens=2,
    max_tokens=64,
)


@pytest.mark.parametrize("defaults", [FULL, GenerationDefaults()])
def test_defaults_survive_a_round_trip(tmp_path: Path, defaults: GenerationDefaults) -> None:
    write_generation(tmp_path, defaults)
    assert read_generation(tmp_path) == defaults


def test_without_settings_a_model_is_decoded_greedily() -> None:
    assert GenerationDefaults().temperature == 0


@pytest.mark.parametrize("key", list(GenerationDefaults.__dataclass_fields__))
def test_a_value_of_another_type_is_named(tmp_path: Path, key: str) -> None:
    write_generation(tmp_path, FULL)
    path = tmp_path / GENERATION_FILE
    for wrong in ("x", {"x": 1}, [True]):
        data: dict[str, Any] = json.loads(path.read_text("utf-8"))
        data[key] = wrong
        broken = tmp_path / str(type(wrong).__name__)
        broken.mkdir(exist_ok=True)
        (broken / GENERATION_FILE).write_text(json.dumps(data), "utf-8")
        with pytest.raises(ManifestError, match=rf"generation\.json\.{key}"):
            read_generation(broken)


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    (tmp_path / GENERATION_FILE).write_text('{"temperatur": 1.0}', "utf-8")
    with pytest.raises(ManifestError, match=r"unknown key 'temperatur' \(did you mean temperature\?\)"):
        read_generation(tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b"[]", b"[" * 200_000])
def test_a_file_that_is_missing_or_no_json_object_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / GENERATION_FILE).write_bytes(content)
    with pytest.raises(ManifestError, match=r"generation\.json"):
        read_generation(tmp_path)
