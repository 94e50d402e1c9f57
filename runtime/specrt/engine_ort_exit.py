"""A target with an early exit on ONNX Runtime: three sessions, the parts of its graph, over the same KV buffers.

A call of the target runs all three. A guess runs the layers below the exit and the output matrix; the state that it
leaves is kept, so that the verify call that follows does not run these layers again for the tokens they have seen.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specrt.engine import EarlyExit
from specrt.engine_bound import Array, BoundCall, CallInputs, input_types
from specrt.engine_ort import OrtEngine, open_checked
from specrt.errors import EngineError
from specrt.kv import KvBlock
from specrt.rows import Row, Rows
from specrt_profiles.exit import ABOVE, BELOW, EXIT_PICKED, OUTPUT, PICKED, STATE, parts_of
from specrt_profiles.manifest import EngineSpec


class OrtExitEngine(OrtEngine):
    """A decoder in parts on the CPU; see `KvEngine` for the contract, and `EarlyExit` for what guesses."""

    def __init__(self, folder: Path, spec: EngineSpec, *, threads: int | None) -> None:
        assert spec.exit is not None
        self._size, self._tables = spec.exit.hidden_size, parts_of(spec.exit, spec.inputs, spec.outputs)
        super().__init__(folder, spec, threads=threads)
        self._lower: dict[int, _Lower] = {}
        self._ahead: list[int] = []  # tokens behind `kv_length` that only the layers below have seen
        self._states = np.empty((max(spec.verify_widths), self._size), np.float32)  # theirs
        self._known = 0  # so many tokens of the call in progress are among them

    @property
    def exit(self) -> EarlyExit:
        """What runs the layers below the exit alone."""
        return self

    @property
    def room(self) -> int:
        """How many tokens can be guessed after those in the KV buffers and one more."""
        return min(len(self._states), self.capacity - self.kv_length)

    def begin(self) -> None:
        """Begin guessing anew, behind the tokens in the KV buffers."""
        self._ahead.clear()

    def guess(self, token_id: int) -> Row:
        """Feed a token to the layers below the exit, behind those before it; return the exit's logits [V]."""
        place = len(self._ahead)
        if place >= self.room:
            raise EngineError(f"expected at most {self.room} guesses before a verify call, found more")
        call = self._lower_call(1)
        self.contents.begin(self.kv_length + place)
        self._states[place] = self._feed(call, (token_id,), self.kv_length + place)[0]
        self._ahead.append(token_id)
        call.output()
        return call.logits

    def restore(self, block: KvBlock) -> None:
        """Copy a block's slots back behind the tokens in the buffers."""
        self._ahead.clear()
        super().restore(block)

    def _run(
        self, token_ids: Sequence[int], width: int, *, num_rows: int, parents: Sequence[int] | None = None
    ) -> Rows:
        """Do what every engine does; of tokens that were guessed from, the layers below are not run again."""
        same = (a == b for a, b in zip(self._ahead, token_ids, strict=False))
        self._known = sum(itertools.takewhile(bool, same)) if parents is None else 0
        try:
            return super()._run(token_ids, width, num_rows=num_rows, parents=parents)
        finally:
            self._ahead.clear()

    def _open(self, folder: Path, spec: EngineSpec, threads: int | None) -> None:
        files = {part: folder / getattr(spec.exit, part) for part in self._tables}
        self._sessions = {part: open_checked(files[part], table, threads) for part, table in self._tables.items()}

    def _bind(self, width: int, num_rows: int) -> BoundCall:
        logits = self._rows_of_logits(num_rows)
        arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in input_types(width, num_rows).items()}
        inputs = CallInputs(arrays)
        state = np.zeros((1, width, self._size), np.float32)  # what pads a call has to be numbers: 0 times NaN is NaN
        rows = np.empty((1, num_rows, self._size), np.float32)
        outputs = {"logits": logits[None]} | self._more_outputs(width)
        none: dict[str, Array] = {
            "logits_indices": np.zeros(0, np.int64),
            EXIT_PICKED: np.empty((1, 0, self._size), np.float32),
        }
        below = self._bound(BELOW, {**arrays, **none, STATE: state})
        above = self._bound(ABOVE, {**arrays, **outputs, STATE: state, PICKED: rows})
        output = self._bound(OUTPUT, {**outputs, PICKED: rows})

        def go(count: int) -> None:
            if self._known:
                self._complete(state[0], arrays["input_ids"][0, :count])
            else:
                below()
            above()
            if num_rows:
                output()

        return BoundCall(inputs, self._runner(go, outputs))

    def _complete(self, state: NDArray[np.float32], token_ids: NDArray[np.int64]) -> None:
        """Fill in the states [n, H] of a call's tokens, running the layers below for those that have none."""
        known, count = self._known, len(token_ids)
        state[:known] = self._states[:known]
        if known < count:
            call = self._lower_call(count - known)
            state[known:count] = self._feed(call, token_ids[known:].tolist(), self.kv_length + known)

    def _lower_call(self, num_tokens: int) -> "_Lower":
        """Return the call of the layers below in the smallest verify width that holds so many tokens."""
        width = self._width(num_tokens)
        if width not in self._lower:
            arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in input_types(width, 1).items()}
            inputs = CallInputs(arrays)
            state, logits = np.empty((1, width, self._size), np.float32), np.empty((1, 1, self.vocab_size), np.float32)
            rows = np.empty((1, 1, self._size), np.float32)
            below = self._bound(BELOW, {**arrays, STATE: state, EXIT_PICKED: rows})
            output = self._bound(OUTPUT, {PICKED: rows, "logits": logits})
            self._lower[width] = _Lower(inputs, below, output, state=state[0], logits=logits[0, 0])
        return self._lower[width]

    def _feed(self, call: "_Lower", token_ids: Sequence[int], start: int) -> NDArray[np.float32]:
        """Run the layers below for tokens from slot `start` on; return their states [n, H]."""
        call.inputs.set(token_ids, start, self.capacity - 1)
        call.below()
        return call.state[: len(token_ids)]

    def _bound(self, part: str, arrays: Mapping[str, Array]) -> Callable[[], None]:
        """Return what runs a part on these arrays and its KV buffers."""
        import onnxruntime as ort

        session, table = self._sessions[part], self._tables[part]
        binding = session.io_binding()
        kv = {name: value for past, present, value in self._kv for name in (past, present)}
        for specs, bind in (
            (table.inputs, binding.bind_ortvalue_input), (table.outputs, binding.bind_ortvalue_output)
        ):  # fmt: skip
            for spec in specs:
                bind(spec.name, kv.get(spec.name) or ort.OrtValue.ortvalue_from_numpy(arrays[spec.name]))
        return partial(session.run_with_iobinding, binding)

    def _release(self) -> None:
        super()._release()
        self._lower.clear()
        self._sessions.clear()


@dataclass(frozen=True, slots=True)
class _Lower:
    """A call of the layers below the exit and, where it is asked for, of the output matrix after the first token."""

    inputs: CallInputs
    below: Callable[[], None]
    output: Callable[[], None]
    state: NDArray[np.float32]  # [W, H]
    logits: NDArray[np.float32]  # [V]
