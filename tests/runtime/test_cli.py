"""The `specrt` command: what goes to standard output and error, and what options mean."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import specrt
from copies import copy_artifact, refresh
from specrt import cli_options
from specrt.cli import main
from specrt.requests import Options

COMMANDS = (
    "bench", "chat", "check", "distill", "export", "generate", "inspect", "models", "plan", "trace", "tune"
)  # fmt: skip
SPECRT = str(Path(sys.executable).with_name("specrt"))
PROMPTS = '{"category": "a", "prompt": "the fox"}\n{"category": "b", "turns": ["def mean(values):"]}\n'


@pytest.fixture(autouse=True)
def _own_home(machine_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep measurements out of the user's home."""
    monkeypatch.setenv("HOME", str(machine_cache))


def run(*arguments: object, stdin: str | bytes | None = "", code: int = 0) -> Result:
    """Run the command in this process."""
    result = CliRunner().invoke(main, [str(word) for word in arguments], input=stdin, prog_name="specrt")
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def process(*arguments: object, stdin: bytes = b"", code: int = 0) -> subprocess.CompletedProcess[bytes]:
    """Run the installed command."""
    words = [SPECRT, *(str(word) for word in arguments)]
    result = subprocess.run(words, input=stdin, capture_output=True, timeout=120, check=False)
    assert result.returncode == code, result
    return result


def expected(artifact: Path, prompt: Any, **options: Any) -> specrt.Result:
    """Return what the library gives."""
    with specrt.load(artifact) as model:
        return model.generate(prompt, **options)


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_page_has_two_examples_that_name_its_options(command: str) -> None:
    page = run(command, "--help").stdout
    examples = [line.strip() for line in page.splitlines() if line.startswith(f"    specrt {command}")]
    assert len(examples) >= 2
    for example in examples:
        for word in example.split():
            assert not word.startswith("-") or word in page.replace(",", " ").split()


def test_the_help_page_lists_every_command_with_a_summary() -> None:
    lines = run("--help").stdout.partition("Commands:")[2].strip().splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert all(len(line.split()) > 2 for line in lines)


def test_without_a_command_the_help_page_is_shown() -> None:
    result = CliRunner().invoke(main, [], prog_name="specrt")
    assert "Commands:" in result.output
    assert result.output == run("--help").stdout


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert run("--version").stdout.strip() == f"specrt, version {version('specrt')}"


def test_every_option_of_a_request_is_on_the_command_line() -> None:
    generate: Any = main.get_command(None, "generate")  # type: ignore[arg-type]
    bench: Any = main.get_command(None, "bench")  # type: ignore[arg-type]
    names = {parameter.name for parameter in generate.params}
    objects = {"controller"}  # which no command line can name
    assert set(Options.__annotations__) - names == {"stream", *objects}, "an option cannot be set from the command line"
    assert {parameter.name for parameter in bench.params} >= names - {
        "prompt", "prompt_file", "system", "logprobs",
    }  # fmt: skip


def test_generate_prints_the_text_to_stdout_and_one_line_of_statistics_to_stderr(tiny_artifact: Path) -> None:
    result = process("generate", tiny_artifact, "the fox", "--max-tokens", 20)
    wanted = expected(tiny_artifact, message("the fox"), max_tokens=20)
    assert result.stdout.decode() == wanted.text + "\n"
    (line,) = result.stderr.decode().splitlines()
    assert line.startswith("finished: length | 20 tokens in ")
    assert "block efficiency" in line


def test_generate_prints_as_it_goes(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import click

    printed: list[tuple[str, bool]] = []
    echo = click.echo

    def record(text: str = "", *, nl: bool = True, **how: Any) -> None:
        printed.append((text, nl))
        echo(text, nl=nl, **how)

    monkeypatch.setattr(click, "echo", record)
    run("generate", tiny_artifact, "the fox", "--max-tokens", 20)
    tokens = [text for text, newline in printed if not newline]
    assert len(tokens) == 20
    assert "".join(tokens) == expected(tiny_artifact, message("the fox"), max_tokens=20).text


@pytest.mark.parametrize("chat", [True, False])
def test_raw_leaves_the_chat_template_out(tiny_artifact: Path, chat: bool) -> None:
    result = run("generate", tiny_artifact, "the fox", "--max-tokens", 12, *([] if chat else ["--raw"]))
    wanted = expected(tiny_artifact, message("the fox") if chat else "the fox", max_tokens=12)
    assert result.stdout == wanted.text + "\n"


def test_an_artifact_without_a_template_continues_the_prompt(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy", lambda data: data["files"].pop("chat_template.jinja"))
    (folder / "chat_template.jinja").unlink()
    wanted = expected(folder, "the fox", max_tokens=12)
    assert run("generate", folder, "the fox", "--max-tokens", 12).stdout == wanted.text + "\n"


def test_a_system_message_comes_first(tiny_artifact: Path) -> None:
    data = generate_json(tiny_artifact, "the fox", "--system", "Be brief.", "--max-tokens", 12)
    messages = [{"role": "system", "content": "Be brief."}, *message("the fox")]
    assert data["token_ids"] == list(expected(tiny_artifact, messages, max_tokens=12).token_ids)


def test_variables_reach_the_chat_template(tiny_artifact: Path, tmp_path: Path) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")
    template = folder / "chat_template.jinja"
    template.write_text("{% if brief %}the fox{% endif %}" + template.read_text("utf-8"), "utf-8")
    refresh(folder)
    words = ("--max-tokens", 4, "--chat-template-kwargs")
    plain, brief = (generate_json(folder, "x", *words, f'{{"brief": {flag}}}') for flag in ("false", "true"))
    added = brief["stats"]["num_prompt_tokens"] - plain["stats"]["num_prompt_tokens"]
    assert added == len(specrt.load(folder).tokenizer.encode("the fox"))


def test_a_character_that_the_console_lacks_does_not_end_the_text(tiny_artifact: Path) -> None:
    words = [SPECRT, "generate", str(tiny_artifact), "the fox", "--raw", "--max-tokens", "200"]
    outs = [
        subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}, check=True).stdout
        for encoding in ("utf-8", "cp1252")
    ]
    assert not outs[0].isascii(), "the text has nothing to lose"
    assert outs[1] == outs[0].decode().encode("cp1252", "replace")


def test_a_conversation_that_is_full_can_be_reset(tiny_artifact: Path) -> None:
    lines = ["the fox", "word " * 200, "/reset", "the fox"]
    result = process("chat", tiny_artifact, "--max-tokens", 6, stdin="\n".join(lines).encode())
    answer = expected(tiny_artifact, message("the fox"), max_tokens=6).text
    assert result.stdout.decode() == f"{answer}\n" * 2
    assert "the capacity is 128: shorten it" in result.stderr.decode()
    assert "/reset starts over" in result.stderr.decode()


def generate_json(artifact: Path, *arguments: object, stdin: str | bytes | None = "") -> dict[str, Any]:
    """Return the object that generate prints; nothing else is printed."""
    result = run("generate", artifact, *arguments, "--json", stdin=stdin)
    assert result.stderr == ""
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def test_json_has_everything_of_a_result(tiny_artifact: Path) -> None:
    data = generate_json(tiny_artifact, "the fox", "--max-tokens", 8, "--logprobs", 2, "--logit-bias", "60=1.5")
    assert set(data) == {"text", "token_ids", "finish_reason", "stop", "logprobs", "params", "stats"}
    assert set(data["params"]) == set(specrt.SamplingParams.__dataclass_fields__)
    assert set(specrt.Statistics.__dataclass_fields__) <= set(data["stats"])
    assert data["stats"]["num_tokens"] == len(data["token_ids"]) == len(data["logprobs"]) == 8
    assert [len(entry["top"]) for entry in data["logprobs"]] == [2] * 8
    assert data["params"]["logit_bias"] == {"60": 1.5}


@pytest.mark.parametrize("how", ["argument", "dash", "left out", "file"])
def test_the_prompt_comes_from_four_places(tiny_artifact: Path, tmp_path: Path, how: str) -> None:
    text = "naïve 你好\n🙂"
    path = tmp_path / "prompt.txt"
    path.write_text(text, "utf-8")
    places = {"argument": [text], "dash": ["-"], "left out": [], "file": ["--prompt-file", str(path)]}
    words = places[how]
    data = generate_json(tiny_artifact, *words, "--raw", "--max-tokens", 8, stdin=text.encode())
    assert data["token_ids"] == list(expected(tiny_artifact, text, max_tokens=8).token_ids)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["-k", "0"], None, None),
        (["--temperature", "0"], "temperature", 0.0),
        (["--temperature", "0", "--top-k", "5"], "temperature", 0.0),
        (["--top-k", "5"], "temperature", 1.0),
        (["--top-k", "0"], "top_k", 0),
        (["--top-p", "0.5"], "top_p", 0.5),
        (["--min-p", "0.5"], "min_p", 0.5),
        (["--repetition-penalty", "1.5"], "repetition_penalty", 1.5),
        (["--frequency-penalty", "0.5"], "frequency_penalty", 0.5),
        (["--presence-penalty", "-0.5"], "presence_penalty", -0.5),
        (["--logit-bias", "5=-1", "--logit-bias", "6=2"], "logit_bias", {"5": -1.0, "6": 2.0}),
        (["--bad-words", "the"], "bad_words", None),
        (["--min-tokens", "2"], "min_tokens", 2),
        (["--max-tokens", "0"], "max_tokens", 0),
        (["--stop", "x", "--stop", "a b"], "stop", ["x", "a b"]),
        (["--stop-token-ids", "5,6"], "stop_token_ids", [5, 6]),
        (["--ignore-eos"], "ignore_eos", True),
        (["--seed", "0"], "seed", 0),
        (["--seed", str(2**64 - 1)], "seed", 2**64 - 1),
        (["--logprobs", "0"], "logprobs", 0),
        (["--coupling", "rejection"], "coupling", "rejection"),
        (["--prompt-lookup-max", "2", "--drafter", "ngram"], None, None),
    ],
    ids=str,
)
def test_options_reach_the_request_and_0_counts_as_set(
    tiny_artifact: Path, words: list[str], name: str | None, value: Any
) -> None:
    limit = [] if "--max-tokens" in words else ["--max-tokens", "6"]
    data = generate_json(tiny_artifact, "the fox", *limit, *words)
    if name is not None and value is not None:
        assert data["params"][name] == value
    if words[0] == "-k":
        assert (data["stats"]["drafter"], data["stats"]["num_proposed"]) == ("none", 0)
    if words[0] == "--max-tokens":
        assert (data["token_ids"], data["finish_reason"]) == ([], "length")
    if words[0] == "--bad-words":
        assert len(data["params"]["bad_words"]) == 2
    if "--drafter" in words:
        assert data["stats"]["drafter"] == "ngram"


def test_k_limits_proposals(tiny_artifact: Path) -> None:
    for k in (1, 2, 9):
        stats = generate_json(tiny_artifact, "the fox", "-k", k, "--max-tokens", 40, "--ignore-eos")["stats"]
        assert len(stats["proposed_by_position"]) <= k
    assert len(stats["proposed_by_position"]) > 2


def test_threads_do_not_change_the_text(tiny_artifact: Path) -> None:
    one = generate_json(tiny_artifact, "the fox", "--threads", 1, "--max-tokens", 20)
    assert one["token_ids"] == generate_json(tiny_artifact, "the fox", "--threads", 2, "--max-tokens", 20)["token_ids"]


def test_given_keeps_every_zero_and_drops_what_was_not_set() -> None:
    options: dict[str, Any] = {
        "a": 0,
        "b": 0.0,
        "c": None,
        "d": False,
        "e": (),
        "f": [],
        "g": {},
        "h": True,
        "i": "",
        "j": (0,),
    }
    assert cli_options.given(options) == {"a": 0, "b": 0.0, "h": True, "i": "", "j": (0,)}


def test_chat_remembers_the_conversation_until_reset(tiny_artifact: Path) -> None:
    result = run("chat", tiny_artifact, "--max-tokens", 6, "--json", stdin="the fox\nmore\n/reset\nthe fox\n")
    turns = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(turns) == 3
    first = expected(tiny_artifact, message("the fox"), max_tokens=6)
    assert turns[0]["token_ids"] == turns[2]["token_ids"] == list(first.token_ids)
    history = [*message("the fox"), {"role": "assistant", "content": first.text}, *message("more")]
    assert turns[1]["token_ids"] == list(expected(tiny_artifact, history, max_tokens=6).token_ids)


def test_chat_begins_with_the_system_message_also_after_a_reset(tiny_artifact: Path) -> None:
    words = ("chat", tiny_artifact, "--max-tokens", 6, "--json", "--system", "Be brief.")
    turns = [json.loads(line) for line in run(*words, stdin="the fox\n/reset\nthe fox\n").stdout.splitlines()]
    wanted = expected(tiny_artifact, [{"role": "system", "content": "Be brief."}, *message("the fox")], max_tokens=6)
    assert [turn["token_ids"] for turn in turns] == [list(wanted.token_ids)] * 2


def test_the_system_message_is_said_once(tiny_artifact: Path) -> None:
    words = ("chat", tiny_artifact, "--max-tokens", 6, "--json", "--system", "Be brief.")
    turns = [json.loads(line) for line in run(*words, stdin="the fox\nmore\n").stdout.splitlines()]
    answer = {"role": "assistant", "content": turns[0]["text"]}
    history = [{"role": "system", "content": "Be brief."}, *message("the fox"), answer, *message("more")]
    wanted = expected(tiny_artifact, history, max_tokens=6)
    assert turns[1]["token_ids"] == list(wanted.token_ids)
    assert turns[1]["stats"]["num_prompt_tokens"] == wanted.stats.num_prompt_tokens


def test_each_turn_of_a_chat_has_its_own_noise(tiny_artifact: Path) -> None:
    words = ("chat", tiny_artifact, "--max-tokens", 12, "--json", "--temperature", 1, "--seed", 4)
    turns = [json.loads(line) for line in run(*words, stdin="the fox\n/reset\nthe fox\n").stdout.splitlines()]
    assert [turn["params"]["stream"] for turn in turns] == [0, 1]
    assert turns[0]["token_ids"] != turns[1]["token_ids"]


class Terminal(io.TextIOWrapper):
    """Input that a person types."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("prompt", [True, False])
def test_a_person_is_asked_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(io.BytesIO("  déjà vu \n".encode())))
    assert cli_options.read_line(prompt=prompt) == "déjà vu"
    assert capsys.readouterr() == ("", "> " if prompt else "")


@pytest.mark.parametrize("end", ["\nignored\n", "", "  \nignored\n"])
def test_chat_ends_at_an_empty_line_or_the_end_of_input(tiny_artifact: Path, end: str) -> None:
    result = process("chat", tiny_artifact, "--max-tokens", 6, stdin=f"the fox\n{end}".encode())
    assert result.stdout.decode() == expected(tiny_artifact, message("the fox"), max_tokens=6).text + "\n"
    assert len(result.stderr.decode().splitlines()) == 1
    assert run("chat", tiny_artifact, stdin="").stdout == ""


def test_bench_prints_a_table_for_every_category_and_setting(tiny_artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS, "utf-8")
    words = ("bench", tiny_artifact, "--prompts", path, "--ks", "1,3", "--repeats", 1, "--max-tokens", 8)
    result = run(*words)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "1 repeats"
    remarks = [line for line in lines if ": " in line]
    rows = [line.split()[:3] for line in lines[4:] if line and line not in remarks]
    drafted = [(drafter, k) for drafter in ("ngram", "suffix", "model", "combined") for k in ("k=1", "k=3")]
    assert sum(line.startswith("combined k=") and "accepted by part: " in line for line in remarks) == 2
    assert [row[:2] for row in rows if row[1].startswith("plain")] == [
        [c, p] for c in ("a", "b", "all") for p in ("plain-1", "plain")
    ]
    assert [row for row in rows if not row[1].startswith("plain")] == [
        [c, *setting] for c in ("a", "b", "all") for setting in drafted
    ]
    data = json.loads(run(*words, "--drafter", "suffix", "--drafter", "model", "--ks", "2,auto", "--json").stdout)
    assert set(data) == {"artifact", "repeats", "rows"}
    assert [(row["drafter"], row["k"]) for row in data["rows"]] == [
        (None, None), (None, None), ("suffix", 2), ("suffix", "auto"), ("model", 2), ("model", "auto"),
    ] * 3  # fmt: skip
    assert data["rows"][-1]["num_tokens"] == 16


def test_bench_compares_all_drafters_at_3_5_and_9_unless_told_otherwise(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def stop(model: Any, prompts: Any, **named: Any) -> None:
        asked.append((named["drafters"], named["ks"], named["repeats"]))
        raise specrt.RequestError("enough")

    monkeypatch.setattr("specrt.bench.run_bench", stop)
    run("bench", tiny_artifact, code=1)
    run("bench", tiny_artifact, "-k", "auto", "--drafter", "ngram", "--repeats", 2, code=1)
    assert asked == [(("ngram", "suffix", "model", "combined"), [3, 5, 9], 3), (("ngram",), ["auto"], 2)]


def test_bench_generates_128_tokens_unless_told_otherwise(tiny_artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fox"}', "utf-8")
    words = ("bench", tiny_artifact, "--prompts", path, "--ks", "", "--repeats", 1, "--raw", "--ignore-eos", "--json")
    with specrt.load(tiny_artifact) as model:
        room = 128 - len(model.tokenizer.encode("fox"))
    assert {row["num_tokens"] for row in json.loads(run(*words).stdout)["rows"]} == {room}
    assert {row["num_tokens"] for row in json.loads(run(*words, "--max-tokens", 0).stdout)["rows"]} == {0}


ENGINE_KEYS = {
    "artifact", "machine", "engine_version", "threads", "repeats", "context", "verify_widths", "read_bytes", "gb_per_s",
    "engines", "calls", "break_even",
}  # fmt: skip


def test_bench_engine_prints_what_calls_cost_and_draws_it(tiny_artifact: Path, tmp_path: Path) -> None:
    plot = tmp_path / "calls.svg"
    words = ("bench", tiny_artifact, "--engine", "--repeats", 1, "--threads", 1)
    result = run(*words, "--plot", plot)
    assert result.stderr == ""
    assert "1 threads" in result.stdout.splitlines()[0]
    assert "median of 1 rounds" in result.stdout.splitlines()[0]
    for words_of_line in (["target", "64", "16"], ["draft", "64", "32"], ["target", "0", "1"]):
        assert any(line.split()[:3] == words_of_line for line in result.stdout.splitlines())
    assert "<svg" in plot.read_text("utf-8")
    data = json.loads(run(*words, "--context", 20, "--json").stdout)
    assert set(data) == ENGINE_KEYS
    assert (data["artifact"], data["threads"], data["context"]) == (str(tiny_artifact), 1, 20)
    assert {call["rows"] for call in data["calls"] if call["context"] == 20} == {1, 2, 4, 6, 8, 10, 16, 32}


@pytest.mark.parametrize(("words", "repeats"), [((), 9), (("--repeats", 2), 2)])
def test_bench_engine_makes_9_rounds_unless_told_otherwise(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], repeats: int
) -> None:
    asked: list[Any] = []

    def stop(model: Any, **named: Any) -> None:
        asked.append(named["repeats"])
        raise specrt.RequestError("enough")

    monkeypatch.setattr("specrt.engine_bench.run_engine_bench", stop)
    run("bench", tiny_artifact, "--engine", *words, code=1)
    assert asked == [repeats]


def test_check_prints_what_it_found(tiny_artifact: Path) -> None:
    result = run("check", tiny_artifact, "--threads", 1)
    assert "sizes and SHA-256 as in the manifest" in result.stdout
    assert (
        "target: widths with the same bits: 2, 4, 6, 10, 16; the loop uses 2, 4, 6, 10, 16; KV is reused token by token"
        in result.stdout
    )
    assert "draft: " in result.stdout
    assert result.stderr == ""
    data = json.loads(run("check", tiny_artifact, "--threads", 1, "--json").stdout)
    assert data["problems"] == []
    assert [engine["name"] for engine in data["engines"]] == ["target", "draft"]


def test_check_ends_with_1_and_an_error_per_problem(tiny_artifact: Path, tmp_path: Path) -> None:
    def flatter(data: dict[str, Any]) -> None:
        data["engines"]["draft"]["parity"].update(max_abs_diff=0.0, mean_kl=0.0)

    folder = copy_artifact(tiny_artifact, tmp_path / "copy", flatter)
    result = run("check", folder, "--threads", 1, code=1)
    assert "sizes and SHA-256" in result.stdout
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: draft: ") for line in lines)
    result = run("check", folder, "--threads", 1, "--json", code=1)
    assert len(json.loads(result.stdout)["problems"]) == 2


def test_inspect_shows_a_page_or_json(tiny_artifact: Path) -> None:
    assert run("inspect", tiny_artifact).stdout.startswith("artifact    ")
    assert set(json.loads(run("inspect", tiny_artifact, "--json").stdout)) == {"manifest", "generation"}


def test_models_lists_the_built_in_names() -> None:
    names = [row["name"] for row in json.loads(run("models", "--json").stdout)]
    assert "smollm2-135m" in names
    lines = run("models").stdout.splitlines()
    assert [line.split()[0] for line in lines] == names


def test_a_reader_that_leaves_ends_the_command_quietly(tiny_artifact: Path) -> None:
    words = [SPECRT, "generate", str(tiny_artifact), "the fox", "--max-tokens", "100", "--ignore-eos"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        said = child.stderr.read().decode()
    assert "Traceback" not in said


def test_bench_with_tree_measures_both_ways(trees_artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fox"}', "utf-8")
    words = ("bench", trees_artifact, "--prompts", path, "--ks", "3", "--repeats", 1, "--max-tokens", 8, "--json")
    settings = ["plain-1", "plain", "ngram k=3", "suffix k=3", "eagle k=3", "combined k=3"]
    assert [row["setting"] for row in json.loads(run(*words).stdout)["rows"][:6]] == settings
    both = [*settings[:4], "suffix tree k=3", "eagle k=3", "eagle tree k=3", "combined k=3", "combined tree k=3"]
    rows = json.loads(run(*words, "--tree").stdout)["rows"]
    assert [(row["setting"], row["tree"]) for row in rows[:9]] == [(name, "tree" in name) for name in both]
