"""What the documents say exists: commands, options, make targets, files, tests; and the embedding example runs."""

import re
import shlex
from pathlib import Path

import click
import pytest

import specrt
from specrt.cli import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.name: path.read_text("utf-8") for path in DOCUMENTS}


def code(text: str) -> list[str]:
    """Return the lines of fenced blocks and the words in backticks, comments left out."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in fenced for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [*lines, *(" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))]


COMMANDS = sorted(
    {(name, line) for name, text in TEXTS.items() for line in code(text) if re.match(r"(specrt|make) [a-z]", line)}
)


@pytest.mark.parametrize(("name", "line"), COMMANDS)
def test_a_command_in_a_document_exists_with_its_options(name: str, line: str) -> None:
    program, target, *words = shlex.split(line, comments=True)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text("utf-8")
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
        for word in words:
            variable = word.partition("=")[0]
            assert f"$({variable})" in makefile
        return
    context = click.Context(main)
    command = main.get_command(context, target)
    assert command is not None
    if words:  # without any, the command is only spoken of
        command.make_parser(click.Context(command, info_name=target)).parse_args(words)


def test_there_are_commands_to_look_at() -> None:
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_line_counts_in_a_document_are_true(document: Path) -> None:
    for words, target in re.findall(r"\[([^\]]+)\]\(([^)#:]+)\)", TEXTS[document.name]):
        path = document.parent / target
        assert path.is_file(), target
        if lines := re.match(r"(\d+)(?:\s+lines)?$", words):
            assert int(lines.group(1)) == len(path.read_text("utf-8").splitlines()), target


@pytest.mark.parametrize("name", TEXTS)
def test_tests_that_a_document_names_exist(name: str) -> None:
    for file, test in re.findall(r"`(?:[\w/]*/)?(test_\w+\.py)(?:::(\w+))?`", TEXTS[name]):
        texts = [path.read_text("utf-8") for path in (ROOT / "tests").rglob(file)]
        assert any(f"def {test}" in text for text in texts), f"{file}::{test}"


def test_the_embedding_example_runs(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", TEXTS["README.md"], re.DOTALL | re.MULTILINE)
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "smollm2").symlink_to(tiny_artifact)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    exec(compile(example, "README.md", "exec"), {"specrt": specrt})
    assert "tokens/s" in capsys.readouterr().out
