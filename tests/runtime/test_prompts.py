"""Prompt files of benchmarks."""

import json
from pathlib import Path

import pytest

from specrt.errors import RequestError
from specrt.prompts import BenchPrompt, load_prompts


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


def test_the_built_in_set_has_several_categories() -> None:
    prompts = load_prompts(None)
    assert len(prompts) >= 10
    assert len({prompt.category for prompt in prompts}) >= 3
    assert all(prompt.text.strip() for prompt in prompts)


def test_the_limit_is_per_category() -> None:
    prompts = load_prompts(None, limit=1)
    categories = [prompt.category for prompt in prompts]
    assert sorted(categories) == sorted(set(categories)) == sorted({prompt.category for prompt in load_prompts(None)})


def test_turns_and_prompt_are_read_with_and_without_category(tmp_path: Path) -> None:
    path = write(
        tmp_path, '{"category": "a", "turns": ["one", "two"]}', "", '{"prompt": "three"}', '  {"turns": ["é 你"]}\r'
    )
    expected = [BenchPrompt("a", "one"), BenchPrompt("all", "three"), BenchPrompt("all", "é 你")]
    assert load_prompts(path) == expected


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x1c"])
def test_only_newlines_separate_lines(tmp_path: Path, separator: str) -> None:
    escaped = json.dumps(separator)[1:-1] if ord(separator) < 32 else separator
    path = write(tmp_path, f'{{"prompt": "a{escaped}b"}}')
    assert load_prompts(path) == [BenchPrompt("all", f"a{separator}b")]


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        "5",
        "null",
        "{}",
        '{"turns": []}',
        '{"turns": null}',
        '{"turns": "one text"}',
        '{"turns": [5]}',
        '{"prompt": {"a": 1}}',
        '{"prompt": null}',
        "[" * 100_000,
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, '{"prompt": "fine"}', "", line)
    with pytest.raises(RequestError, match=r"prompts\.jsonl, line 3: expected a JSON object with 'turns' or 'prompt'"):
        load_prompts(path)


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(RequestError, match="at least one prompt"):
        load_prompts(write(tmp_path, content))


def test_invalid_utf_8_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"prompts\.jsonl: cannot be read as UTF-8 text.*0xff"):
        load_prompts(write(tmp_path, b'{"prompt": "\xff"}'))


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(RequestError, match="cannot be read"):
            load_prompts(path)
