"""`specrt trace`: every token in its place with its origin, whatever drafts and however the text ends."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import specrt
from specrt.acceptance import Proposal
from specrt.cli import main
from specrt.control import Step
from specrt.trace import Trace, pieces, run_trace, trace_step
from specrt.trace_page import trace_page

PROMPT = "the quick brown fox and the quick brown fox"
SETTINGS: list[dict[str, Any]] = [
    {"k": 3},
    {"k": "auto"},
    {"k": 5, "temperature": 0.7, "seed": 1},
    {"k": 5, "temperature": 0.7, "seed": 1, "coupling": "rejection"},
    {"k": 3, "repetition_penalty": 1.2, "logit_bias": {70: 1.0}, "bad_words": ["z"]},
]


def traced(model: specrt.LanguageModel, prompt: Any = PROMPT, **options: Any) -> Trace:
    given: Any = {"max_tokens": 40, "ignore_eos": True, **options}
    return run_trace(model, prompt, given)


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix", "model", "combined"])
@pytest.mark.parametrize("options", SETTINGS)
def test_the_steps_hold_the_text_of_the_same_request_and_its_counts(
    tiny_model: specrt.LanguageModel, drafter: str, options: dict[str, Any]
) -> None:
    given = {"max_tokens": 40, "ignore_eos": True, "drafter": drafter, **options}
    trace = traced(tiny_model, **given)
    stats = trace.result.stats
    if options["k"] != "auto" or drafter not in ("model", "combined"):
        assert trace.result.token_ids == tiny_model.generate(PROMPT, **given).token_ids
    assert tuple(piece.token_id for step in trace.steps for piece in step.committed) == trace.result.token_ids
    assert len(trace.steps) == stats.num_steps
    assert trace.steps[0].start == stats.num_prompt_tokens == len(trace.prompt)
    origins = Counter(origin for step in trace.steps for origin in step.origins)
    assert origins["accepted"] == stats.num_accepted
    parts = Counter(step.part for step in trace.steps if step.proposed and step.part)
    assert parts == {name: counts.num_drafts for name, counts in stats.parts.items()}
    assert (drafter == "combined") == bool(parts)
    assert origins["plain"] == sum(not step.proposed for step in trace.steps)
    assert origins.total() == stats.num_tokens
    assert sum(step.rest_s for step in trace.steps) == pytest.approx(stats.rest_s)
    assert sum(step.verify_s for step in trace.steps) == pytest.approx(stats.verify_s)
    assert all(min(step.draft_s, step.verify_s, step.rest_s) >= 0 for step in trace.steps)


def test_a_recovered_token_follows_a_rejected_guess_and_a_bonus_token_follows_none(
    tiny_model: specrt.LanguageModel,
) -> None:
    found = set()
    for step in traced(tiny_model, drafter="model", k=3).steps:
        found.add(step.last_origin)
        verdicts = [guess.verdict for guess in step.proposed]
        assert verdicts[: step.num_accepted] == ["accepted"] * step.num_accepted
        assert ("rejected" in verdicts) == (step.last_origin == "recovered")
        if step.last_origin == "recovered":
            assert verdicts[step.num_accepted] == "rejected"
            assert step.proposed[step.num_accepted].piece.token_id != step.committed[-1].token_id
            assert set(verdicts[step.num_accepted + 1 :]) <= {"unread"}
    assert {"recovered", "bonus"} <= found


def test_a_stop_inside_a_block_leaves_only_what_was_committed(tiny_model: specrt.LanguageModel) -> None:
    whole = traced(tiny_model, drafter="model", k=5)
    step = next(step for step in whole.steps if step.num_accepted > 1)
    end = step.start + 1 - len(whole.prompt)
    cut = traced(tiny_model, drafter="model", k=5, max_tokens=end, min_tokens=0)
    assert len(cut.result.token_ids) == end
    ids = [piece.token_id for step in cut.steps for piece in step.committed]
    assert tuple(ids) == cut.result.token_ids == whole.result.token_ids[:end]
    stop = whole.result.token_ids[end - 1]
    stopped = traced(tiny_model, drafter="model", k=5, stop_token_ids=[stop])
    assert stopped.result.finish_reason == "stop"
    last = stopped.steps[-1]
    assert len(last.origins) == len(last.committed) <= last.num_accepted + 1
    assert last.committed[-1].token_id == stop


def test_nothing_is_generated_where_nothing_may_be(tiny_model: specrt.LanguageModel) -> None:
    trace = traced(tiny_model, max_tokens=0)
    assert trace.steps == ()
    assert "Ended: length." in page_of(tiny_model, trace)


def test_the_guesses_of_a_tree_are_judged_along_their_branches(tiny_model: specrt.LanguageModel) -> None:
    #  a (accepted) - b (rejected), c (accepted) - d (rejected);  e (rejected) - f (unread)
    a, b, c, d, e, f = (tiny_model.tokenizer.encode(word)[0] for word in "abcdef")
    proposal = Proposal((a, e, b, c, f, d), parents=(-1, -1, 0, 0, 1, 3))
    step = Step(proposal=proposal, num_drafted=6, num_accepted=2, draft_s=0.0, verify_s=0.0)
    (last,) = tiny_model.tokenizer.encode("g")
    found = trace_step(step, [a, c, last], [5, 6], tiny_model.tokenizer, rest_s=0.0)
    verdicts = ["accepted", "rejected", "rejected", "accepted", "unread", "rejected"]
    assert [guess.verdict for guess in found.proposed] == verdicts
    assert [guess.path for guess in found.proposed] == [(0,), (1,), (0, 2), (0, 3), (1, 4), (0, 3, 5)]
    assert found.origins == ("accepted", "accepted", "recovered")
    leaf = trace_step(step, [a, b, last], [5, 6], tiny_model.tokenizer, rest_s=0.0)
    assert leaf.last_origin == "bonus"  # nothing was guessed after b


def test_a_character_of_several_tokens_is_shown_by_its_last(tiny_model: specrt.LanguageModel) -> None:
    ids = tiny_model.tokenizer.encode("ab\U0001f980c")  # a crab, which the vocabulary has no token for
    found = pieces(tiny_model.tokenizer, [], ids)
    assert "".join(piece.text for piece in found) == "ab\U0001f980c"
    begun = 1 + [piece.text for piece in found].index("")
    later = pieces(tiny_model.tokenizer, ids[:begun], ids[begun:])
    assert "".join(piece.text for piece in later) == "\U0001f980c"


def page_of(model: specrt.LanguageModel, trace: Trace, **options: Any) -> str:
    return trace_page(trace, model.manifest, model.tokenizer, options)


def test_markup_in_a_text_is_text(tiny_model: specrt.LanguageModel) -> None:
    prompt = "<script>alert(1)</script>\n\t\u202e&amp;"
    page = page_of(tiny_model, traced(tiny_model, prompt, max_tokens=5), drafter="<b>")
    assert "<script" not in page.lower()
    assert "\u202e" not in page
    for shown in ("drafter &lt;b&gt;", "&lt;", "alert", "&amp;", "\u23ce\n", "\u21e5\t", "\u2039U+202E\u203a"):
        assert shown in page


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(main, [str(word) for word in arguments], prog_name="specrt")
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


@pytest.fixture
def home(machine_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(machine_cache))


@pytest.mark.usefixtures("home")
def test_the_command_writes_the_page_and_says_what_is_in_it(tiny_artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.html"
    words = ["trace", tiny_artifact, PROMPT, "--raw", "-o", out, "--max-tokens", 12, "--ignore-eos", "-k", 3]
    line = run(*words).stdout
    assert line.startswith(f"{out}: 12 tokens in ")
    page = out.read_text("utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.html"]
    found = json.loads(run(*words, "--json").stdout)
    assert sum(len(step["token_ids"]) for step in found["steps"]) == 12 == found["stats"]["num_tokens"]
    assert {"accepted", "recovered"} & {origin for step in found["steps"] for origin in step["origins"]}


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("missing/trace.html", "expected a folder at {0}/missing, found none"),
        ("", "{0} cannot be written: name another file"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_loaded(
    tmp_path: Path, out: str, reason: str
) -> None:
    error = run("trace", tmp_path / "no artifact", "x", "-o", tmp_path / out, code=1).stderr
    assert error == f"error: trace: {reason.format(tmp_path)}" + ("" if not out else ": make it first") + "\n"
    assert list(tmp_path.iterdir()) == []
