"""`specrt trace`: one generation step by step: what was proposed, what became of it, and how long it took."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from specrt.control import Step
from specrt.language_model import LanguageModel
from specrt.requests import Options, Prompt, prompt_ids
from specrt.stream import Result
from specrt.text import Tokenizer

Origin = Literal["accepted", "recovered", "bonus", "plain"]
Outcome = Literal["accepted", "rejected", "unread"]
ORIGINS: dict[Origin, str] = {
    "accepted": "proposed by the drafter and accepted",
    "recovered": "the target's own, where it rejected a guess",
    "bonus": "the target's own, after all guesses were accepted",
    "plain": "the target's own, where nothing was proposed",
}
_LEAD = 8  # tokens decoded before those of interest, so that a character that began in them is known


@dataclass(frozen=True, slots=True)
class Piece:
    """A token and what it adds to the text: empty for a special token and for a part of a character."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Guess:
    """A verified guess, and what became of it: unread where an earlier rejection left it without meaning.

    path: the numbers of the guesses before it in its branch, and its own; one branch holds all unless they are a tree.
    """

    piece: Piece
    path: tuple[int, ...]
    verdict: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One step of the loop, after `start` tokens.

    committed: the tokens it added, of which the first `num_accepted` were guesses; fewer if a stop rule cut them.
    last_origin: where the token after the accepted ones comes from. num_drafted: how many guesses there were before the
    controller cut them. part: of a combined drafter, that made them.
    """

    start: int
    committed: tuple[Piece, ...]
    proposed: tuple[Guess, ...]
    last_origin: Origin
    num_drafted: int
    num_accepted: int
    part: str | None
    draft_s: float
    verify_s: float
    rest_s: float

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where each committed token comes from."""
        accepted: list[Origin] = ["accepted"] * self.num_accepted
        return (*accepted, self.last_origin)[: len(self.committed)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A generation: the prompt's tokens, the steps, and the result."""

    prompt: tuple[Piece, ...]
    steps: tuple[TracedStep, ...]
    result: Result

    def to_dict(self) -> dict[str, Any]:
        """Return the steps for JSON."""
        return {"steps": [_to_dict(step) for step in self.steps]}


def run_trace(model: LanguageModel, prompt: Prompt, options: Options) -> Trace:
    """Generate and keep what each step did; raises what `LanguageModel.generate` does."""
    engine, given = model.target, options.copy()
    ids = prompt_ids(
        prompt, model.tokenizer, vocab_size=engine.vocab_size, capacity=engine.capacity,
        template_kwargs=given.pop("chat_template_kwargs", None),
    )  # fmt: skip
    steps: list[Step] = []
    blocks: list[list[int]] = []
    rest_s: list[float] = []  # up to the end of each step
    with model.start(ids, given, steps=steps) as stream:
        for token in stream:
            if len(blocks) < len(steps):
                blocks.append([])
                rest_s.append(stream.result.stats.rest_s)
            blocks[-1].append(token.id)
        result = stream.result
    traced, done = [], list(ids)
    for step, block, (before, after) in zip(steps, blocks, pairwise([0.0, *rest_s]), strict=True):
        traced.append(trace_step(step, block, done, model.tokenizer, rest_s=after - before))
        done += block
    return Trace(prompt=pieces(model.tokenizer, [], ids), steps=tuple(traced), result=result)


def trace_step(
    step: Step, block: Sequence[int], before: Sequence[int], tokenizer: Tokenizer, *, rest_s: float
) -> TracedStep:
    """Return what a step did with the tokens `before` it; `block` are those it committed."""
    proposal, node = step.proposal, -1
    path: list[int] = []
    for token_id in block:
        children = proposal.children(node)
        if token_id not in children:
            break
        node = children[token_id]
        path.append(node)
    num_accepted = step.num_accepted if len(path) == len(block) else len(path)  # a stop cut the block, or it is whole
    guesses: list[Guess] = []
    parents = proposal.parents or range(-1, len(proposal.token_ids) - 1)
    for number, (token_id, parent) in enumerate(zip(proposal.token_ids, parents, strict=True)):
        above = guesses[parent].path if parent >= 0 else ()
        (piece,) = pieces(tokenizer, [*before, *(proposal.token_ids[node] for node in above)], [token_id])
        read = parent < 0 or parent in path
        verdict: Outcome = "accepted" if number in path else "rejected" if read else "unread"
        guesses.append(Guess(piece, (*above, number), verdict))
    nothing: Origin = "bonus" if proposal.token_ids else "plain"
    return TracedStep(
        start=len(before), committed=pieces(tokenizer, before, block), proposed=tuple(guesses),
        last_origin="recovered" if proposal.children(node) else nothing, num_drafted=step.num_drafted,
        num_accepted=num_accepted, part=proposal.part, draft_s=step.draft_s, verify_s=step.verify_s, rest_s=rest_s,
    )  # fmt: skip


def pieces(tokenizer: Tokenizer, before: Sequence[int], token_ids: Sequence[int]) -> tuple[Piece, ...]:
    """Return tokens with what each adds to the text of those before it."""
    known = max(0, len(before) - _LEAD)
    detokenizer = tokenizer.detokenizer(before[:known])
    for token_id in before[known:]:
        detokenizer.push(token_id)
    return tuple(Piece(token_id, detokenizer.push(token_id)) for token_id in token_ids)


def _to_dict(step: TracedStep) -> dict[str, Any]:
    return {
        "token_ids": [piece.token_id for piece in step.committed], "origins": step.origins,
        "proposed_ids": [guess.piece.token_id for guess in step.proposed], "num_drafted": step.num_drafted,
        "num_accepted": step.num_accepted, "part": step.part,
        "draft_s": step.draft_s, "verify_s": step.verify_s, "rest_s": step.rest_s,
    }  # fmt: skip
