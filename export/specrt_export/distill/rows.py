"""What a batch of rows writes: every row is a stream of documents, each with turns that are given or written."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specrt_export.distill.turns import Task, Template

FIXED, USER, GREEDY, SAMPLED = 0, 1, 2, 3  # where a token comes from: template or given, written user, written answer
_LOOP = 96  # tokens that repeat with a period of at most a third of this are a loop
_FORCED = -1.0
_QUOTED = 32  # tokens of the shortest text that a task is about
_REMEMBERED = 256  # texts of either kind


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingPlan:
    """How documents are made: limits in tokens, and shares.

    A written user turn is drawn at temperature 1; answers are greedy, but for the share `sampled`, which is drawn at
    `temperature`. A finished answer is followed by another turn while the document is shorter than `continue_below`.
    `starts`: token ids that user turns begin with; `complete`: they are whole turns. Otherwise the share `quoting` of
    the turns are `tasks` about an earlier answer of the shard (`fence`: the token that code begins and ends with), and
    the share `bare` of the others begins with nothing.
    """

    template: Template
    starts: Sequence[Sequence[int]]
    complete: bool
    tasks: Sequence[Task] = ()
    fence: int = -1
    quoting: float = 0.4
    bare: float = 0.4
    sampled: float = 0.2
    temperature: float = 0.7
    user_limit: int = 384
    answer_limit: int = 256
    continue_below: int = 160


@dataclass(slots=True)
class _Document:
    """One row's document so far: what is still to be fed, who writes, and how much the turn has."""

    start: int
    temperature: float
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    answering: bool = False
    written: int = 0
    answer: list[int] = field(default_factory=list)


class Rows:
    """Decides token by token what each row is fed; knows nothing of the model."""

    def __init__(self, plan: WritingPlan, num_rows: int, rng: np.random.Generator) -> None:
        self._plan, self._rng = plan, rng
        self._slot = 0
        self._texts: dict[bool, deque[list[int]]] = {code: deque(maxlen=_REMEMBERED) for code in (False, True)}
        self._history = np.full((num_rows, _LOOP), -1 - np.arange(_LOOP), np.int64)
        self._rows = [self._begin(0) for _ in range(num_rows)]
        self.tokens: list[NDArray[np.int64]] = []  # per slot [rows]
        self.roles: list[NDArray[np.int64]] = []
        self.starts: list[NDArray[np.int64]] = []  # per slot, the first slot of each row's document

    def temperatures(self) -> NDArray[np.float64]:
        """Return per row the temperature of the next token: 0 for greedy, negative where it is given."""
        return np.array([_FORCED if row.queue else row.temperature for row in self._rows])

    def is_user(self) -> NDArray[np.bool_]:
        """Tell per row whether the next token is a user's."""
        return np.array([not row.answering for row in self._rows])

    def beginning(self) -> NDArray[np.bool_]:
        """Tell per row whether the next token is the first of its document."""
        return np.array([row.start == self._slot for row in self._rows])

    def feed(self, picked: NDArray[np.int64]) -> None:
        """Take the next token of every row: the given one where there is one, else the picked one."""
        self.starts.append(np.array([row.start for row in self._rows]))
        fed = [self._take(index, int(token)) for index, token in enumerate(picked)]
        tokens, roles = (np.array(values, np.int64) for values in zip(*fed, strict=True))
        self.tokens.append(tokens)
        self.roles.append(roles)
        self._history = np.concatenate([self._history[:, 1:], tokens[:, None]], axis=1)
        self._slot += 1
        if self._slot % (_LOOP // 3) == 0:
            for index in np.flatnonzero(repeats(self._history)):
                self._rows[index] = self._begin(self._slot)

    def _take(self, index: int, picked: int) -> tuple[int, int]:
        row, plan = self._rows[index], self._plan
        if row.queue:
            return row.queue.popleft()
        row.written += 1
        role = USER if not row.answering else GREEDY if row.temperature == 0 else SAMPLED
        ended = picked in plan.template.ends
        if row.answering:
            if not ended:
                row.answer.append(picked)
            if ended or row.written >= plan.answer_limit:
                self._remember(row.answer)
            if ended and plan.template.after and self._slot - row.start < plan.continue_below:
                row.queue.extend((token, FIXED) for token in _rest(plan.template.after, picked))
                self._user_turn(row)
            elif ended or row.written >= plan.answer_limit:
                self._rows[index] = self._begin(self._slot + 1)
        elif ended or row.written >= plan.user_limit:
            self._answer(row)
            return row.queue.popleft()
        return picked, role

    def _begin(self, slot: int) -> _Document:
        row = _Document(start=slot, temperature=1.0)
        self._user_turn(row)
        return row

    def _user_turn(self, row: _Document) -> None:
        plan = self._plan
        row.answering, row.temperature, row.written = False, 1.0, 0
        possible = [task for task in plan.tasks if self._texts[task.code]]
        if possible and self._rng.random() < plan.quoting:
            self._quote(row, possible[int(self._rng.integers(len(possible)))])
            return
        if plan.complete or not plan.template.before or self._rng.random() >= plan.bare:
            start = plan.starts[int(self._rng.integers(len(plan.starts)))]
            row.queue.extend((int(token), USER) for token in start)
            row.written = len(start)
            if plan.complete:
                self._answer(row)
        if not plan.template.between:
            self._answer(row)

    def _quote(self, row: _Document, task: Task) -> None:
        """Give a row a turn about one of the texts."""
        texts = self._texts[task.code]
        text = texts[int(self._rng.integers(len(texts)))]
        row.queue.extend((token, FIXED) for token in (*task.before, *text, *task.after))
        if not task.open:
            self._answer(row)

    def _remember(self, answer: list[int]) -> None:
        """Keep an answer for tasks: the code in it, or all of it where there is none."""
        places = [place for place, token in enumerate(answer) if token == self._plan.fence]
        if places:
            answer = answer[places[0] : places[1] + 1] if len(places) > 1 else []
        if len(answer) >= _QUOTED:
            self._texts[bool(places)].append(answer)

    def _answer(self, row: _Document) -> None:
        row.queue.extend((token, FIXED) for token in self._plan.template.between)
        row.answering, row.written, row.answer = True, 0, []
        row.temperature = self._plan.temperature if self._rng.random() < self._plan.sampled else 0.0


def repeats(history: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell which rows of the last tokens [R, n] repeat with a period of at most a third of n."""
    found = np.zeros(len(history), bool)
    for period in range(1, history.shape[1] // 3 + 1):
        found |= (history[:, period:] == history[:, :-period]).all(1)
    return found


def _rest(after: Sequence[int], ended_with: int) -> Sequence[int]:
    """Return what follows an answer's end token, which the template's piece may begin with."""
    return after[1:] if after and after[0] == ended_with else after
