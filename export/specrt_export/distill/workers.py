"""Writes the shards of a text that are missing, in several processes of one thread each.

One thread per process: products of this size lose more by waiting for each other than they gain from a second core,
above all on a machine that does other work too.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch

from specrt_export.checkpoint import Checkpoint
from specrt_export.distill.rows import WritingPlan
from specrt_export.distill.shards import shard_path, write_shard
from specrt_export.distill.writer import BatchSize, write_text
from specrt_export.errors import ExportError
from specrt_export.support import load_model

_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingJob:
    """What a process needs to write any shard of a text."""

    checkpoint: Checkpoint
    plan: WritingPlan
    size: BatchSize
    folder: Path
    seed: int


def write_shards(
    job: WritingJob, numbers: Sequence[int], *, processes: int, out_of_time: Callable[[], bool],
    on_tokens: Callable[[int], None],
) -> bool:  # fmt: skip
    """Write the numbered shards, of which none is there yet; return whether all are.

    They are not when `out_of_time` says so: what is half written then is lost. `on_tokens` is told the tokens of this
    call so far. Raises `ExportError` when a process fails.
    """
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    count = min(processes, len(numbers))
    started: list[BaseProcess] = [
        context.Process(target=_write, args=(job, numbers[first::count], counter), daemon=True)
        for first in range(count)
    ]
    try:
        for process in started:
            process.start()
        while running := [process for process in started if process.exitcode is None]:
            running[0].join(_POLL_S)
            on_tokens(counter.value)
            if failed := [process.exitcode for process in started if process.exitcode]:
                raise ExportError(
                    f"a process that writes text ended with {failed[0]}: is there memory for {count} of them?"
                )
            if running and out_of_time():
                return False
    finally:
        for process in started:
            if process.pid is not None:
                process.terminate()
                process.join()
    return True


def _write(job: WritingJob, numbers: Sequence[int], counter: "Synchronized[int]") -> None:
    """Write shards, one after the other; runs in a process of its own."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    model = load_model(job.checkpoint).to(torch.bfloat16)

    def count(num_tokens: int) -> None:
        with counter.get_lock():
            counter.value += num_tokens
        if parent is not None and not parent.is_alive():
            os._exit(1)

    for number in numbers:
        shard = write_text(model, job.plan, job.size, seed=(job.seed, number), on_step=count)
        write_shard(shard_path(job.folder, number), shard)
