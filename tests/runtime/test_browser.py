"""The pages in a real browser: shown, in their colours, without a complaint, and without room left over at the side."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
from browser import ask, find, visit
from specrt.bench import BenchRow, run_bench
from specrt.bench_page import bench_page
from specrt.page import PHASES
from specrt.prompts import BenchPrompt
from specrt.trace import ORIGINS, Trace, run_trace
from specrt.trace_page import trace_page

pytestmark = pytest.mark.browser
PROMPT = "<script>document.title = 'broken'</script> the fox and the fox and the fox \U0001f980"
BACKGROUND = {
    "accepted": "rgb(191, 232, 218)", "recovered": "rgb(251, 230, 189)", "bonus": "rgb(207, 229, 247)",
    "plain": "rgb(236, 238, 241)",
}  # fmt: skip


@dataclass
class Written:
    page: Path
    content: Any


@pytest.fixture(scope="module", autouse=True)
def _browser() -> None:
    assert find() is not None, "--browser was given, and there is no Chromium"


@pytest.fixture(scope="module")
def model(tiny_artifact: Path, machine_cache: Path) -> Iterator[specrt.LanguageModel]:
    with specrt.load(tiny_artifact, cache_dir=machine_cache) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def trace(model: specrt.LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A trace with tokens of every origin."""
    found = run_trace(model, PROMPT, {"max_tokens": 80, "ignore_eos": True, "drafter": "ngram", "k": 5})
    assert {origin for step in found.steps for origin in step.origins} == set(ORIGINS)
    path = tmp_path_factory.mktemp("trace") / "trace.html"
    path.write_text(trace_page(found, model.manifest, model.tokenizer, {"k": 5}), "utf-8")
    return Written(path, found)


@pytest.fixture(scope="module")
def bench(model: specrt.LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Written:
    prompts = [BenchPrompt("code & <b>", "the fox and the fox"), BenchPrompt("chat", "def mean(values):")]
    rows = run_bench(
        model, prompts, drafters=["ngram", "model"], ks=["auto", 1, 3], repeats=1, chat=False, on_run=lambda: None,
        options={"max_tokens": 20, "ignore_eos": True}, predict=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("bench") / "index.html"
    path.write_text(bench_page(rows, ["a <machine>"]), "utf-8")
    return Written(path, rows)


def colours(picture: Path) -> set[tuple[int, ...]]:
    """Return the colours of a picture's points."""
    from matplotlib.image import imread

    points = np.unique((imread(picture)[..., :3] * 255).round().astype(int).reshape(-1, 3), axis=0)
    return set(map(tuple, points.tolist()))


def rgb(colour: str) -> tuple[int, ...]:
    if colour.startswith("#"):
        return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return tuple(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))


def test_a_complaint_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!DOCTYPE html><script>console.error('a complaint'); undefined_name</script>", "utf-8")
    assert len(visit(page, tmp_path).complaints) == 2


def test_the_trace_is_shown_in_its_colours_without_a_complaint(trace: Written, tmp_path: Path) -> None:
    shown = visit(trace.page, tmp_path, height=1400)
    assert shown.complaints == []
    assert "<title>SpecRT trace</title>" in shown.document
    assert {rgb(colour) for colour in BACKGROUND.values()} <= colours(shown.picture)


def test_every_token_of_the_trace_has_its_text_and_the_colour_of_its_origin(trace: Written, tmp_path: Path) -> None:
    question = (
        "[...document.querySelectorAll('.text .step > .t')].map(e =>"
        " [e.textContent, getComputedStyle(e).backgroundColor])"
    )
    found = ask(trace.page, tmp_path, question)
    content: Trace = trace.content
    pairs = [
        (piece, origin) for step in content.steps for piece, origin in zip(step.committed, step.origins, strict=True)
    ]
    assert [colour for _, colour in found] == [BACKGROUND[origin] for _, origin in pairs]
    assert all(text for text, _ in found), "a token cannot be seen"
    texts = [(text, piece.text) for (text, _), (piece, _) in zip(found, pairs, strict=True) if piece.text.isalnum()]
    assert texts
    assert all(text == expected for text, expected in texts)


def test_a_step_tells_its_story_when_it_is_reached_and_the_prompt_stays_text(trace: Written, tmp_path: Path) -> None:
    question = (
        "(() => { const step = document.querySelectorAll('.step')[0], card = step.querySelector('.card');"
        " const before = getComputedStyle(card).display; location.hash = step.id;"
        " const box = card.getBoundingClientRect();"
        " return [before, getComputedStyle(card).display, box.left, box.right, card.innerText,"
        " document.querySelector('details').textContent, document.title,"
        " document.documentElement.scrollWidth] })()"
    )
    before, after, left, right, story, prompt, title, width = ask(trace.page, tmp_path, question)
    assert (before, after) == ("none", "block")
    assert 0 <= left < right <= 1200
    assert story.startswith("Step 1: ")
    assert "verify" in story
    assert "<script>document.title = 'broken'</script>" in prompt
    assert title == "SpecRT trace"
    assert width <= 1200


def test_the_trace_fits_a_narrow_window(trace: Written, tmp_path: Path) -> None:
    assert ask(trace.page, tmp_path, "document.documentElement.scrollWidth", width=600) <= 600


def test_the_bench_report_is_shown_with_all_its_charts(bench: Written, tmp_path: Path) -> None:
    shown = visit(bench.page, tmp_path, height=1600)
    assert shown.complaints == []
    assert {rgb(colour) for colour in PHASES.values()} <= colours(shown.picture)
    question = (
        "[[...document.querySelectorAll('h2')].map(e => e.textContent), document.querySelectorAll('svg').length,"
        " [...document.querySelectorAll('td:nth-child(2)')].map(e => e.textContent),"
        " [...document.querySelectorAll('svg text')].map(e => e.textContent),"
        " [...document.querySelectorAll('svg rect')].map(e => getComputedStyle(e).fill),"
        " document.documentElement.scrollWidth, document.querySelector('.soft').textContent]"
    )
    heads, charts, settings, labels, fills, width, fact = ask(bench.page, tmp_path, question)
    assert heads == [
        "Tokens per second by category", "Accepted by position of the guess", "Where the time of a token goes",
        "Predicted and measured", "All numbers",
    ]  # fmt: skip
    rows: list[BenchRow] = bench.content
    assert charts == 4
    assert settings == [row.setting for row in rows]
    assert {"code & <b>", "chat", "all", "ms per token", "tokens/s", "ngram k=auto", "model k=3"} <= set(labels)
    assert len(fills) == len(rows) + 3 * 8 + 2 * 7  # by category, by phase, predicted and measured
    assert len(set(fills[: len(rows)])) == 8, "two settings have one colour"
    assert width <= 1200
    assert fact == "a <machine>"
