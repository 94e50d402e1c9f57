"""What users get wrong: one line that begins with `error:`, code 1, no traceback, nothing on standard output."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from copies import copy_artifact, edit_manifest, refresh
from specrt import language_model
from specrt.cli import main

SPECRT = str(Path(sys.executable).with_name("specrt"))


@pytest.fixture(autouse=True)
def _own_home(machine_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep measurements out of the user's home."""
    monkeypatch.setenv("HOME", str(machine_cache))


def error_of(arguments: list[Any], *, stdin: bytes = b"") -> str:
    """Return the one line that the command ends with."""
    result = CliRunner().invoke(main, [str(word) for word in arguments], input=stdin, prog_name="specrt")
    assert result.exit_code == 1, (result.stdout, result.stderr, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    return one_line(result.stdout, result.stderr)


def process_error(arguments: list[str | bytes], *, stdin: bytes = b"", env: dict[str, str] | None = None) -> str:
    """Return the one line that the installed command ends with."""
    words: Any = [SPECRT, *arguments]
    result = subprocess.run(
        words, input=stdin, capture_output=True, timeout=120, check=False, env={**os.environ, **(env or {})}
    )
    assert result.returncode == 1, result
    return one_line(result.stdout.decode(), result.stderr.decode())


def one_line(stdout: str, stderr: str) -> str:
    assert stdout == ""
    (line,) = stderr.splitlines()
    assert line.startswith("error: ")
    assert "Traceback" not in line
    return line


GENERATE: dict[str, tuple[list[str], str]] = {
    "temperature": (["--temperature", "-1"], "temperature: expected 0 (greedy) or more, found -1.0"),
    "temperature nan": (["--temperature", "nan"], "temperature: expected"),
    "top-p": (["--top-p", "0"], "top_p: expected above 0"),
    "top-k": (["--top-k", "-1"], "top_k: expected 0"),
    "top-k text": (["--top-k", "many"], "'many' is not a valid integer"),
    "min-p": (["--min-p", "2"], "min_p: expected"),
    "repetition": (["--repetition-penalty", "0"], "repetition_penalty: expected above 0"),
    "frequency": (["--frequency-penalty", "inf"], "frequency_penalty: expected a finite number"),
    "presence": (["--presence-penalty", "nan"], "presence_penalty: expected a finite number"),
    "bias form": (["--logit-bias", "five"], "expected ID=VALUE, found 'five'"),
    "bias value": (["--logit-bias", "5="], "expected ID=VALUE, found '5='"),
    "bias id": (["--logit-bias", "9999=1"], "logit_bias: expected token ids from 0 to 383, found 9999"),
    "bias inf": (["--logit-bias", "5=inf"], "logit_bias: expected finite values or -inf"),
    "bad words": (["--bad-words", ""], "bad_words: expected no empty word"),
    "min tokens": (["--min-tokens", "-1"], "min_tokens: expected 0 or more"),
    "max tokens": (["--max-tokens", "-1"], "max_tokens: expected 0 or more"),
    "stop": (["--stop", ""], "stop: expected no empty string"),
    "stop ids": (["--stop-token-ids", "1;2"], "expected whole numbers with commas between, found '1;2'"),
    "stop id": (["--stop-token-ids", "384"], "stop_token_ids: expected token ids from 0 to 383"),
    "seed": (["--seed", "-1"], "seed: expected 0 to 2**64 - 1"),
    "seed large": (["--seed", str(2**64)], "seed: expected 0 to 2**64 - 1"),
    "logprobs": (["--logprobs", "65", "--json"], "logprobs: expected 0 to 64"),
    "logprobs unseen": (["--logprobs", "2"], "--logprobs needs --json"),
    "system unseen": (["--system", "Be brief.", "--raw"], "--system needs the chat template"),
    "template variables": (["--chat-template-kwargs", "[1]"], "expected a JSON object, found '[1]'"),
    "template variables unseen": (["--chat-template-kwargs", '{"a": 1}', "--raw"], "expected a prompt of messages"),
    "coupling": (["--coupling", "none"], "'none' is not one of 'gumbel', 'rejection'"),
    "drafter": (["--drafter", "eagle"], "the artifact has ngram, suffix, model, combined, none, found 'eagle'"),
    "k": (["-k", "16"], "k: expected 0 (plain) to 15"),
    "k below": (["-k", "-1"], "k: expected 0 (plain) to 15"),
    "lookup long": (["--prompt-lookup-max", "33"], "expected 1 <= min <= max <= 32, found 1 and 33"),
    "lookup": (["--prompt-lookup-max", "0", "--drafter", "ngram"], "expected 1 <= min <= max"),
    "tree": (["--tree", "--drafter", "suffix"], "tree: the artifact takes chains only: export it with --trees"),
    "threads": (["--threads", "0"], "0 is not in the range x>=1"),
    "option": (["--temprature", "1"], "--temperature"),
    "two prompts": (["another"], "unexpected extra argument"),
    "no value": (["--top-k"], "requires an argument"),
    "prompt twice": (["--prompt-file", "a.txt"], "give PROMPT or --prompt-file, not both"),
    "long prompt": (["--system", "word " * 300], "the capacity is 128: shorten it"),
    "surrogate": (["--system", "a\udcff"], "half of a surrogate pair, not valid in UTF-8"),
}


@pytest.mark.parametrize("name", GENERATE)
def test_generate_says_what_is_wrong_with_an_option(tiny_artifact: Path, name: str) -> None:
    words, says = GENERATE[name]
    assert says in error_of(["generate", tiny_artifact, "the fox", *words])


ELSEWHERE: dict[str, tuple[list[str], str]] = {
    "no such command": (["generat"], "No such command 'generat'"),
    "option of the group": (["--fast"], "No such option '--fast'"),
    "no artifact": (["generate"], "Missing argument 'ARTIFACT'. (see 'specrt generate --help')"),
    "generate nowhere": (["generate", "nowhere", "x"], "nowhere: no manifest.json there: expected a folder written by"),
    "chat nowhere": (["chat", "nowhere"], "no manifest.json there"),
    "prompt file": (["generate", "x", "--prompt-file", "nowhere.txt"], "nowhere.txt: cannot be read: No such file or"),
    "prompt folder": (["generate", "x", "--prompt-file", "."], "cannot be read: Is a directory"),
    "bench nowhere": (["bench", "nowhere"], "no manifest.json there"),
    "check nowhere": (["check", "nowhere"], "no manifest.json there"),
    "inspect nowhere": (["inspect", "nowhere"], "no manifest.json there"),
    "inspect without": (["inspect"], "Missing argument 'ARTIFACT'"),
    "bench ks": (["bench", "{artifact}", "--ks", "a,b"], "expected a whole number or 'auto', found 'a'"),
    "bench cache": (["bench", "{artifact}", "--suffix-cache"], "--suffix-cache would draft every repeat from the run"),
    "bench ks and k": (["bench", "{artifact}", "--ks", "3", "-k", "5"], "give --ks or -k, not both"),
    "a prompt for an artifact": (["generate", "a" * 300], "cannot be read: File name too long"),
    "bench large k": (["bench", "{artifact}", "--ks", "40", "--prompts", "{prompts}"], "k: expected 0 (plain) to 15"),
    "bench prompts": (["bench", "{artifact}", "--prompts", "nowhere"], "nowhere: cannot be read as UTF-8 text"),
    "bench limit": (["bench", "{artifact}", "--limit", "0"], "0 is not in the range x>=1"),
    "bench drafter": (["bench", "{artifact}", "--drafter", "x", "--prompts", "{prompts}"], "drafter: the artifact has"),
    "bench long": (["bench", "{artifact}", "--limit", "1"], "the capacity is 128: shorten it"),
    "bench tree": (["bench", "{artifact}", "--tree", "--prompts", "{prompts}"], "tree: the artifact takes chains only"),
    "bench engine context": (
        ["bench", "{artifact}", "--engine", "--context", "113"],
        "context: expected 0 to 112, the capacity less the widest",
    ),
    "bench engine ks": (
        ["bench", "{artifact}", "--engine", "--ks", "3"],
        "--ks has no effect with --engine: leave it out",
    ),
    "bench engine raw": (["bench", "{artifact}", "--engine", "--raw"], "--raw has no effect with --engine"),
    "bench engine k": (["bench", "{artifact}", "--engine", "-k", "0"], "-k has no effect with --engine"),
    "bench engine seed": (["bench", "{artifact}", "--seed", "1", "--engine"], "--seed has no effect with --engine"),
    "bench engine plot": (["bench", "nowhere", "--engine", "--plot", "a.pdf"], "ends in .png or .svg, found 'a.pdf'"),
    "bench plot": (["bench", "{artifact}", "--plot", "a.png"], "--plot needs --engine"),
    "bench context": (["bench", "{artifact}", "--context", "0"], "--context needs --engine"),
    "models option": (["models", "--all"], "No such option '--all'"),
    "export without out": (["export", "smollm2-135m"], "Missing option '-o' / '--out'"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_every_command_says_what_is_wrong(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "fox"}')
    words, says = ELSEWHERE[name]
    assert says in error_of([word.format(artifact=tiny_artifact, prompts="prompts.jsonl") for word in words])


def test_usage_errors_name_the_help_page(tiny_artifact: Path) -> None:
    assert error_of(["generate", tiny_artifact, "--fast"]).endswith("(see 'specrt generate --help')")


def test_a_bad_prompt_file_names_the_line(tiny_artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n{"text": "not"}\n')
    assert "prompts.jsonl, line 2: expected" in error_of(["bench", tiny_artifact, "--prompts", path])


def test_an_empty_prompt_is_refused(tiny_artifact: Path) -> None:
    assert "the prompt is empty" in error_of(["generate", tiny_artifact, "", "--raw"])
    assert "the prompt is empty" in error_of(["generate", tiny_artifact, "--raw"], stdin=b"")


def test_invalid_utf_8_is_refused_wherever_it_comes_from(tiny_artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"ab\xffc")
    says = "the prompt is not valid UTF-8: byte 2 is 0xff"
    assert says in error_of(["generate", tiny_artifact], stdin=b"ab\xffc")
    assert says in error_of(["generate", tiny_artifact, "--prompt-file", path])
    assert "the message is not valid UTF-8: byte 2" in error_of(["chat", tiny_artifact], stdin=b"ab\xffc\n")
    assert says in process_error(["generate", str(tiny_artifact), b"ab\xffc"])
    assert says in process_error(["generate", str(tiny_artifact)], stdin=b"ab\xffc")


def test_an_artifact_path_of_any_bytes_can_be_shown() -> None:
    assert "no manifest.json there" in process_error(["inspect", b"no\xffwhere"], env={"PYTHONIOENCODING": "utf-8"})


def test_messages_that_the_template_refuses_are_one_line(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no\\nsystem\\nmessage') }}")
    refresh(folder)
    line = error_of(["generate", folder, "the fox"])
    assert line == "error: the chat template refuses the messages: no system message"


def test_chat_without_a_template_is_refused(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy", lambda data: data["files"].pop("chat_template.jinja"))
    (folder / "chat_template.jinja").unlink()
    assert "no chat template" in error_of(["chat", folder], stdin=b"the fox\n")


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: refresh(folder) if (folder / name).write_bytes(content) else None


def cut(folder: Path) -> None:
    path = folder / "target.onnx.data"
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json there"),
    "manifest": (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json: not readable as JSON"),
    "schema": (
        lambda folder: edit_manifest(folder, lambda data: data.update(schema=99)),
        "schema 99 is newer than 1, the newest this SpecRT reads: upgrade SpecRT",
    ),
    "cut weights": (cut, "target.onnx.data: expected 458752 bytes, found 458751: copy the file again"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "listed in the manifest but missing"),
    "tokenizer": (write("tokenizer.json", b"{}"), "tokenizer.json: not a readable tokenizer"),
    "defaults": (write("generation.json", b'{"temprature": 1}'), "did you mean temperature"),
    "graph": (write("target.onnx", b"garbage"), "target.onnx: ONNX Runtime"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_artifact_is_one_line(tiny_artifact: Path, tmp_path: Path, name: str) -> None:
    damage, says = DAMAGES[name]
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")
    damage(folder)
    assert says in error_of(["generate", folder, "the fox"])


def test_a_changed_byte_is_found_by_check(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")
    path = folder / "target.onnx.data"
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    assert "target.onnx.data: expected SHA-256" in error_of(["check", folder])


def test_a_missing_engine_names_the_line_that_installs_it(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    line = error_of(["generate", tiny_artifact, "the fox"])
    assert line == "error: onnxruntime not installed: run pip install 'specrt[cpu]'"


def test_a_bug_keeps_its_traceback(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "load", lambda *_, **__: 1 / 0)
    result = CliRunner().invoke(main, ["generate", str(tiny_artifact), "the fox"])
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"], ["check"], ["bench"], ["tune"]])
def test_a_device_that_there_is_not_is_one_line(tiny_artifact: Path, command: list[str]) -> None:
    name, *rest = command
    line = error_of([name, tiny_artifact, *rest, "--device", "gpu"], stdin=b"hello\n")
    assert line == "error: device: expected cpu or cuda:N (cuda:0 is the first GPU), found 'gpu'"


def test_calls_are_measured_on_the_cpu_only(tiny_artifact: Path) -> None:
    line = error_of(["bench", tiny_artifact, "--engine", "--device", "cuda:0"])
    assert "--device has no effect with --engine: leave it out" in line


def test_trees_of_a_drafter_that_has_none_are_refused(trees_artifact: Path) -> None:
    for words in (["generate", trees_artifact, "the fox"], ["bench", trees_artifact, "--limit", "1", "--raw"]):
        says = "tree: expected a drafter of trees (suffix, eagle, combined), found 'ngram'"
        assert says in error_of([*words, "--tree", "--drafter", "ngram"])
