"""Run every setting of every peer on every prompt, one after the other, all the others waiting."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.client import Worker, WorkerError, cpu_seconds
from benchmarks.peers.protocol import PLAIN, Job
from benchmarks.peers.quality import mean_kl
from benchmarks.peers.registry import PEERS
from benchmarks.peers.results import Lane, LaneFacts, Run, Setting

_WARM_UP = 8  # tokens
_SETTLE_S = 0.05  # between runs: threads of the last one may still be looking for work


@dataclass(frozen=True, slots=True)
class PromptIds:
    """A prompt as the token ids that every peer gets."""

    category: str
    ids: list[int]


class Bench:
    """The workers of all lanes. What fails is noted in the lane's facts and left out from there on."""

    def __init__(self, facts: dict[Lane, LaneFacts], settings: Sequence[Setting], logs: Path) -> None:
        self._facts = facts
        self._settings = settings
        self._logs = logs
        self._workers: dict[tuple[Lane, Setting], Worker] = {}

    def open(self, lane: Lane, python: Path, job: Callable[[str | None], Job]) -> None:
        """Start and load the lane's workers, one for all modes that can share; `job` gives the job of a mode."""
        by_mode: dict[str | None, Worker] = {}
        more = [Setting(mode, 0) for mode in PEERS[lane.peer].more]
        for setting in (*more, *self._settings):
            mode = setting.mode if setting.mode in PEERS[lane.peer].separate else None
            try:
                if mode not in by_mode:
                    log = self._logs / f"{lane.peer}-{lane.variant.replace('/', '-')}-{mode or 'all'}.log"
                    by_mode[mode] = Worker(python, PEERS[lane.peer].module, job(mode), log)
                    by_mode[mode].ask("open")
                self._workers[lane, setting] = by_mode[mode]
            except WorkerError as error:
                self._note(lane, setting, error)

    def judge(self, texts: Sequence[list[int]], source: Sequence[NDArray[np.float32]], scratch: Path) -> None:
        """Take the lanes' distance to the source and their size on disk, from their plain workers."""
        for (lane, setting), worker in list(self._workers.items()):
            if setting.mode != PLAIN:
                continue
            facts = self._facts[lane]
            try:
                facts.num_bytes = worker.ask("size")
                rows = []
                for ids in texts:
                    worker.ask("logits", ids=ids, path=str(scratch))
                    rows.append(np.load(scratch))
                facts.kl = mean_kl(source, rows)
            except (WorkerError, ValueError) as error:
                facts.notes.append(f"no KL: {error}")
            finally:
                scratch.unlink(missing_ok=True)

    def warm_up(self, prompt: PromptIds) -> None:
        """Give every setting a few tokens: bindings, memory, kernels that are chosen at first use."""
        for lane, setting in list(self._workers):
            self._ask(lane, setting, prompt, _WARM_UP)

    def run(self, prompts: Sequence[PromptIds], *, n: int, repeats: int, on_run: Callable[[], None]) -> list[Run]:
        """Alternate: per prompt and repeat every setting once, in turned order at every other repeat.

        The runs of a setting that failed at some prompt are left out: its mean would be over other prompts.
        """
        runs = []
        for number, prompt in enumerate(prompts):
            for repeat in range(repeats):
                for lane, setting in _order(self._workers, repeat):
                    run = self._run(lane, setting, number, prompt, n)
                    on_run()
                    if run:
                        runs.append(run)
        return [run for run in runs if (run.lane, run.setting) in self._workers]

    @property
    def num_settings(self) -> int:
        """How many settings there are to run."""
        return len(self._workers)

    def close(self) -> None:
        """End all processes."""
        for worker in set(self._workers.values()):
            worker.close()

    def _run(self, lane: Lane, setting: Setting, number: int, prompt: PromptIds, n: int) -> Run | None:
        time.sleep(_SETTLE_S)
        own = self._workers[lane, setting]
        others = [worker.pid for worker in set(self._workers.values()) if worker is not own]
        before = cpu_seconds(others)
        answer = self._ask(lane, setting, prompt, n)
        after = cpu_seconds(others)
        if answer is None:
            return None
        idle = None if before is None or after is None else after - before
        return Run(
            lane=lane, setting=setting, prompt=number, category=prompt.category, ids=tuple(answer["ids"]),
            num_timed=answer["num_timed"], decode_s=answer["decode_s"], prompt_s=answer["prompt_s"], idle_s=idle,
        )  # fmt: skip

    def _ask(self, lane: Lane, setting: Setting, prompt: PromptIds, n: int) -> dict[str, object] | None:
        try:
            answer: dict[str, object] = self._workers[lane, setting].ask(
                "generate", ids=prompt.ids, n=n, mode=setting.mode, k=setting.k
            )
            if len(answer["ids"]) != n:
                raise WorkerError(f"gave {len(answer['ids'])} tokens instead of {n}")
        except WorkerError as error:
            self._note(lane, setting, error)
            self._workers.pop((lane, setting))
            return None
        return answer

    def _note(self, lane: Lane, setting: Setting, error: Exception) -> None:
        self._facts[lane].notes.append(f"{setting}: {error}")


def _order(keys: Iterable[tuple[Lane, Setting]], repeat: int) -> list[tuple[Lane, Setting]]:
    """Return the settings, the other way round at odd repeats, so that none always follows the same one."""
    order = list(keys)
    return order[::-1] if repeat % 2 else order
