"""`specrt export` and `specrt models`: the result on standard output, everything else on standard error."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import tiny
from specrt.cli import main
from specrt_export import artifact
from specrt_export.progress import Progress
from specrt_profiles.files import sha256_of
from specrt_profiles.manifest import read_manifest


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Put the signal handler back that the command replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


PROFILE = 'capacity = 64\nprefill_width = 8\nverify_widths = [2, 4]\nnum_draft_tokens = 3\nprecision = "int8"\n'


def test_standard_output_is_the_folder_and_nothing_else(
    tiny_source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(PROFILE, "utf-8")
    out = tmp_path / "out"
    result = run("export", tiny_source, "-o", out, "--profile", tmp_path / "mine.toml", "--precision", "fp32")
    assert result.exit_code == 0
    assert result.stdout == f"{out}\n"
    assert capfd.readouterr().out == ""
    for step in (
        "target: trace the graph",
        "target: write weights as fp32",
        "target: parity and row exactness",
    ):
        assert step in result.stderr
    assert "0.1 M parameters at fp32" in result.stderr
    profile = read_manifest(out).profile
    assert (profile.name, profile.capacity, profile.precision) == ("mine", 64, "fp32")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no-such-model"], "unknown model 'no-such-model'"),
        ([], "expected either a MODEL to export or --add-to DIR with a --draft"),
        (["no-such-model", "--draft-precision", "int8"], "--draft-precision needs a draft model or head: "),
        (
            ["smollm2-135m", "--revision", "main"],
            "smollm2-135m is not on the hub: a revision can only be chosen of a hub",
        ),
        (["no-such-model", "--profile", "cpux"], "unknown profile 'cpux' (did you mean cpu"),
        (["no-such-model", "--capacity", "1"], "profile cpu: capacity: expected at least 2 tokens, found 1"),
        (["someone/some-model"], "cannot reach the hub for someone/some-model"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_status_one(tmp_path: Path, arguments: list[str], text: str) -> None:
    result = run("export", *arguments, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {text}")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    result = run("export", "smollm2-135m", "-o", tmp_path, "--cache-dir", tmp_path / "cache")
    assert result.exit_code == 1
    assert "replace it with --overwrite" in result.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--precision", "int4"], "--precision has no effect with --add-to: the target there stays as it is"),
        (["--capacity", "64"], "--capacity has no effect with --add-to"),
        (["--dialect", "tensorrt"], "--dialect has no effect with --add-to"),
        (["--trees"], "--trees has no effect with --add-to"),
        (["--head", "head.safetensors"], "--head has no effect with --add-to"),
        (["--profile", "edge"], "--profile has no effect with --add-to"),
        ([], "--add-to needs a --draft: a model, ngram, suffix or none"),
    ],
)
def test_an_option_without_effect_is_refused(
    tiny_artifact: Path, tmp_path: Path, arguments: list[str], text: str
) -> None:
    draft = ["--draft", "none"] if arguments else []
    result = run("export", "--add-to", tiny_artifact, "-o", tmp_path / "out", *draft, *arguments)
    assert result.exit_code == 1
    assert text in result.stderr


def make_would_run(folder: Path, *variables: str) -> list[str]:
    """Return the commands that `make export` would run, whether or not another make runs this test."""
    (folder / ".specrt-ready").touch()
    ready = ["-n", "--no-print-directory", "-o", f"{folder}/.specrt-ready", f"VENV={folder}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", *ready, "export", *variables],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [" ".join(line.split()) for line in done.stdout.replace("\\\n", " ").strip().splitlines()]


@pytest.mark.parametrize(
    ("model", "out"),
    [
        ("qwen2.5-coder-0.5b", "artifacts/qwen2.5-coder-0.5b"),
        ("org/Llama-3.2-1B", "artifacts/Llama-3.2-1B"),
        ("./my-model/", "artifacts/my-model"),
        ("models/a.b.gguf", "artifacts/a.b"),
    ],
)
def test_make_export_names_the_folder_after_the_model(tmp_path: Path, model: str, out: str) -> None:
    assert f'export "{model}" --out "{out}"' in make_would_run(tmp_path, f"MODEL={model}")[-1]


def test_make_export_for_tensorrt_builds_a_plan_as_well(tmp_path: Path) -> None:
    for more, precision, builder in (
        ([], "fp16", ""),
        (["PRECISION=int4", "BUILDER=tensorrt"], "int4", "--builder tensorrt"),
    ):
        first, second = make_would_run(tmp_path, "MODEL=some", "TARGET=tensorrt", *more)[-2:]
        assert "--dialect tensorrt" in first
        assert first.count("--precision") == 1
        assert f"--precision {precision}" in first
        assert second == f'{tmp_path}/bin/specrt plan {builder} "artifacts/some"'.replace("  ", " ")


@pytest.mark.parametrize("option", [["--precision", "fp8"], ["--add-to", "/no/such/folder"], ["--capcity", "3"]])
def test_a_wrong_option_is_named(tmp_path: Path, option: list[str]) -> None:
    result = run("export", "model", "-o", tmp_path / "out", *option)
    assert result.exit_code != 0
    assert option[0] in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("given", "head"),
    [
        ([], "smollm2-135m-eagle.safetensors"),
        (["--precision", "int8", "--trees", "--draft-precision", "int8"], "smollm2-135m-eagle.safetensors"),
        (["--head", "mine.safetensors"], "mine.safetensors"),
        (["--head", "mine.safetensors", "--draft", "ngram"], "mine.safetensors"),
        (["--head", "none"], None),
        (["--draft", "ngram"], None),
        (["--dialect", "tensorrt", "--precision", "fp16"], None),
    ],
)
def test_a_built_in_model_brings_its_head_unless_another_drafter_is_named(
    given: list[str], head: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[artifact.ExportRequest] = []
    monkeypatch.setattr(artifact, "export", lambda request, progress: asked.append(request))
    assert run("export", "smollm2-135m", "-o", tmp_path / "out", *given).exit_code == 0
    assert [path.name for path in asked[0].heads] == ([] if head is None else [head])


def test_models_are_listed_for_people_and_programs(tmp_path: Path) -> None:
    assert "smollm2-135m" in run("models", "--cache-dir", tmp_path).stdout
    rows = json.loads(run("models", "--json", "--cache-dir", tmp_path).stdout)
    assert {"name", "megabytes", "cached", "description"} == set(rows[0])
    assert [row["cached"] for row in rows] == [False] * len(rows)


@pytest.mark.slow
def test_termination_leaves_nothing_and_keeps_the_old_artifact(
    tiny_source: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for path in tiny_artifact.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    before = {path.name: sha256_of(path) for path in out.iterdir()}
    command = [sys.executable, "-c", "from specrt.cli import main; main()", "export", str(tiny_source), "-o", str(out)]
    command += ["-o", str(out), "--overwrite", "--capacity", "128"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        while len(list(tmp_path.iterdir())) == 1 and process.poll() is None:
            time.sleep(0.01)
        process.terminate()
        stdout, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert stdout == b""
    assert list(tmp_path.iterdir()) == [out]
    assert {path.name: sha256_of(path) for path in out.iterdir()} == before


class Terminal:
    """Collects what is written, as a terminal or as a file."""

    def __init__(self, terminal: bool) -> None:
        self.text, self._terminal = "", terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return self._terminal


def test_a_step_is_announced_and_completed_with_its_duration() -> None:
    stream, ticks = Terminal(False), iter([1.0, 3.5])
    progress = Progress(stream=stream, clock=lambda: next(ticks))  # type: ignore[arg-type]
    with progress.step("load"):
        assert stream.text == "  load ...\n"
    assert stream.text.endswith("  load: 2.5 s\n")


def test_on_a_terminal_the_announcement_is_replaced() -> None:
    stream, ticks = Terminal(True), iter([0.0, 1.0])
    with Progress(stream=stream, clock=lambda: next(ticks)).step("load"):  # type: ignore[arg-type]
        assert "\n" not in stream.text
    assert stream.text.endswith("\r\x1b[K  load: 1.0 s\n")


@pytest.mark.parametrize("terminal", [False, True])
def test_transfers_are_silent_unless_something_is_transferred(terminal: bool) -> None:
    stream = Terminal(terminal)
    ticks = iter([0.0, 2.0, 0.0, 2.0])
    progress = Progress(stream=stream, clock=lambda: next(ticks))  # type: ignore[arg-type]
    with progress.bytes("fetch"):
        pass
    assert stream.text == ""
    with progress.bytes("fetch") as advance:
        advance(5_000_000)
        advance(7_000_000)
    assert stream.text.count("\n") == 1
    assert "fetch: 12 MB" in stream.text


def test_a_bar_reports_its_duration_in_a_file_too() -> None:
    stream, ticks = Terminal(False), iter([0.0, 4.0])
    progress = Progress(stream=stream, clock=lambda: next(ticks))  # type: ignore[arg-type]
    with progress.bar("write", 100) as advance:
        advance(100)
    assert stream.text.endswith("  write: 4.0 s\n")


@pytest.mark.slow
def test_an_export_is_repeatable_to_the_byte(tiny_source: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    again = tiny.export_tiny(tiny_source, tmp_path / "again")
    for name in ("target.onnx", "target.onnx.data", "tokenizer.json", "generation.json"):
        assert sha256_of(again / name) == sha256_of(tiny_artifact / name)
