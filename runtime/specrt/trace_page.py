"""The page of `specrt trace`: the text, each token in the colour of its origin, each step's story beside it."""

from collections.abc import Sequence
from typing import Any

from specrt.page import PHASES, page, series_legend, shown, tiles
from specrt.stats import describe_parts
from specrt.svg import Series, stacked
from specrt.text import Tokenizer
from specrt.trace import ORIGINS, Guess, Piece, Trace, TracedStep
from specrt_profiles.manifest import Manifest

_STYLE = """
main { display: grid; grid-template-columns: minmax(0, 1fr) 340px; column-gap: 32px; }
aside { position: sticky; top: 24px; height: calc(100vh - 48px); }
.t { border-radius: 3px 3px 0 0; padding: 1px 0 0; }
.accepted { background: #bfe8da; border-bottom: 3px solid #009e73; }
.recovered { background: #fbe6bd; border-bottom: 3px dashed #c98a00; }
.bonus { background: #cfe5f7; border-bottom: 3px double #0072b2; }
.plain { background: #eceef1; border-bottom: 3px dotted #737d89; }
.rejected { color: #8f3d00; background: #fbe1d3; text-decoration: line-through; }
.unread { color: #59636f; background: #f1f2f4; text-decoration: line-through; }
.sign { font-size: 80%; opacity: .75; }
.text, .code { font: 14px/2 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4; }
.code { font-size: 13px; line-height: 1.9; }
.step { margin-right: 3px; outline-offset: 2px; cursor: default; }
.step:hover, .step:focus, .step:target { outline: 2px solid #1c2430; border-radius: 2px; }
.key > span { display: grid; grid-template-columns: 40px 1fr; margin: 0 0 6px; font-size: 13px; line-height: 1.4; }
.key .t { width: 28px; height: 18px; }
.card { display: none; position: fixed; z-index: 1; top: 232px; width: 340px; max-height: calc(100vh - 260px);
  right: max(20px, calc(50vw - 560px)); overflow: auto; white-space: normal; text-align: left;
  font: 13px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: var(--ink);
  background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 10px 14px; }
.card.idle { display: block; z-index: 0; }
.step:target .card, .step:focus .card { display: block; }
.step:focus .card { z-index: 2; }
.step:hover .card { display: block; z-index: 3; }
.card b, .card .row { display: block; }
.card .row { margin-top: 6px; }
.bar { display: flex; height: 8px; margin-top: 4px; }
details { margin: 12px 0; } summary { cursor: pointer; }
.scroll { overflow-x: auto; }
@media (max-width: 960px) {
  main { display: block; } aside { position: static; height: auto; } .card.idle { display: none; }
  .card { top: auto; bottom: 0; left: 0; right: 0; width: auto; max-height: 45vh; }
}
"""
_PART = "\u25cc"  # stands for a token that is only a part of a character
_WIDTH, _NARROWEST = 780, 3  # pixels: the text's column, a step in the picture


def trace_page(trace: Trace, manifest: Manifest, tokenizer: Tokenizer, options: dict[str, Any]) -> str:
    """Return the page; `options` are those that were given."""
    model, stats = manifest.target.model, trace.result.stats
    given = {"drafter": stats.drafter, **options}
    if trace.result.params.temperature > 0:
        given["seed"] = trace.result.params.seed
    said = ", ".join(f"{name} {value}" for name, value in given.items())
    steps = trace.steps
    text = "".join(_step(number, step, tokenizer) for number, step in enumerate(steps, 1))
    prompt = "".join(_token(piece, "", tokenizer) for piece in trace.prompt)
    column = [
        "<h1>Where each token came from</h1>",
        f'<p class="soft">{shown(f"{model.name} at {manifest.target.precision}: {said}")}</p>',
        _summary(trace),
        f"<details><summary>The prompt, {len(trace.prompt)} tokens</summary>"
        f'<div class="code" dir="auto">{prompt}</div></details>',
        f'<div class="text" dir="auto">{text}</div>',
        f'<p class="soft">Ended: {_end(trace, tokenizer)}.</p>',
        "<h2>Time of each step</h2>",
        series_legend(_phases(steps)),
        f'<div class="scroll">{_times(steps)}</div>',
    ]
    return page("SpecRT trace", f"<div>{''.join(column)}</div>\n{_side()}", style=_STYLE)


def _summary(trace: Trace) -> str:
    stats = trace.result.stats
    facts = [
        (f"{stats.tokens_per_s:.1f}", "tokens/s"),
        (f"{stats.block_efficiency:.2f}", "tokens per step (block efficiency)"),
        (f"{stats.acceptance_rate:.0%}", f"accepted, {stats.num_accepted} of {stats.num_proposed}"),
        (f"{stats.num_tokens}", f"tokens in {stats.num_steps} steps"),
        (f"{stats.decode_s:.2f} s", f"draft {stats.draft_s:.2f}, verify {stats.verify_s:.2f}, rest {stats.rest_s:.2f}"),
        (f"{stats.prefill_s:.2f} s", f"prompt of {stats.num_prompt_tokens} tokens"),
    ]
    if stats.estimated_speedup is not None and stats.num_proposed:
        facts[0] = (f"{stats.tokens_per_s:.1f}", f"tokens/s, about {stats.estimated_speedup:.2f} x plain")
    parts = f'<p class="soft">Accepted by part: {shown(describe_parts(stats.parts))}.</p>' if stats.parts else ""
    hint = f'<p class="hint">{shown(stats.hint)}</p>' if stats.hint else ""
    return tiles(facts) + parts + hint


def _side() -> str:
    key = "".join(
        f'<span><i class="t {origin}"></i><span><b>{origin}</b>: {shown(text)}</span></span>'
        for origin, text in ORIGINS.items()
    )
    idle = "Point at the text, or move through it with the tab key: each block is a step."
    return f'<aside><div class="key">{key}</div><div class="card idle">{idle}</div></aside>'


def _step(number: int, step: TracedStep, tokenizer: Tokenizer) -> str:
    tokens = "".join(
        _token(piece, origin, tokenizer) for piece, origin in zip(step.committed, step.origins, strict=True)
    )
    return f'<span class="step" id="step-{number}" tabindex="0">{tokens}{_card(number, step, tokenizer)}</span>'


def _card(number: int, step: TracedStep, tokenizer: Tokenizer) -> str:
    """Return what is shown while a step is pointed at."""
    first, last = step.start + 1, step.start + len(step.committed)
    where = f"token {first}" if first == last else f"tokens {first} to {last}"
    rows = [f"<b>Step {number}: {where}</b>"]
    if step.proposed:
        cut = f", of {step.num_drafted} drafted" if step.num_drafted > len(step.proposed) else ""
        guesses = _guesses(step.proposed, tokenizer)
        who = f" by {shown(step.part)}" if step.part else ""
        rows.append(_row(f'Proposed {len(step.proposed)}{cut}{who}:<span class="code row" dir="auto">{guesses}</span>'))
    elif step.num_drafted:
        rows.append(_row(f"None of {step.num_drafted} drafted tokens was verified"))
    else:
        rows.append(_row("Nothing proposed"))
    rows.append(_row(_verdict(step, tokenizer)))
    rows.append(_row(", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in _seconds(step))))
    total = sum(seconds for _, seconds in _seconds(step)) or 1.0
    bar = "".join(f'<i style="width: {s / total:.2%}; background: {PHASES[name]}"></i>' for name, s in _seconds(step))
    return f'<span class="card">{"".join(rows)}<span class="bar">{bar}</span></span>'


def _row(content: str) -> str:
    return f'<span class="row">{content}</span>'


def _guesses(guesses: Sequence[Guess], tokenizer: Tokenizer) -> str:
    """Return guesses one after the other, or a line for each, moved in by its depth, where they are a tree."""
    ordered = sorted(guesses, key=lambda guess: guess.path)
    chain = len(guesses[-1].path) == len(guesses)
    lead = [("" if chain else "\n" * bool(place) + "  " * (len(g.path) - 1)) for place, g in enumerate(ordered)]
    return "".join(before + _token(g.piece, g.verdict, tokenizer) for before, g in zip(lead, ordered, strict=True))


def _verdict(step: TracedStep, tokenizer: Tokenizer) -> str:
    accepted = f"Accepted {step.num_accepted} of {len(step.proposed)}, then " if step.proposed else "The target says: "
    if len(step.committed) <= step.num_accepted:
        return f"Accepted {step.num_accepted} of {len(step.proposed)}; the text ended with number {len(step.committed)}"
    name = f"{step.last_origin}: " if step.proposed else ""
    return f'{accepted}{name}<span class="code">{_token(step.committed[-1], step.last_origin, tokenizer)}</span>'


def _token(piece: Piece, role: str, tokenizer: Tokenizer) -> str:
    """Return a token in the colour of its role; a sign stands for one without a text of its own."""
    if piece.text:
        content = shown(piece.text)
    elif "\ufffd" in tokenizer.decode([piece.token_id]):
        content = f'<span class="sign">{_PART}</span>'
    else:
        content = f'<span class="sign">{shown(tokenizer.spelling(piece.token_id))}</span>'
    return f'<span class="t {role}">{content}</span>' if role else content


def _end(trace: Trace, tokenizer: Tokenizer) -> str:
    reason, stop = trace.result.finish_reason, trace.result.stop
    if stop is None:
        return shown(reason)
    return shown(f"{reason} at {tokenizer.spelling(stop) if isinstance(stop, int) else repr(stop)}")


def _seconds(step: TracedStep) -> list[tuple[str, float]]:
    return list(zip(PHASES, (step.draft_s, step.verify_s, step.rest_s), strict=True))


def _phases(steps: Sequence[TracedStep]) -> list[Series]:
    columns = zip(*((step.draft_s, step.verify_s, step.rest_s) for step in steps), strict=True)
    values = list(columns) or [()] * len(PHASES)
    return [
        Series(name, colour, tuple(1e3 * s for s in column))
        for (name, colour), column in zip(PHASES.items(), values, strict=True)
    ]


def _times(steps: Sequence[TracedStep]) -> str:
    width = max(_WIDTH, _NARROWEST * len(steps))
    numbers = [str(number) for number in range(1, len(steps) + 1)]
    return stacked(numbers, _phases(steps), unit="ms", width=width, height=170)
