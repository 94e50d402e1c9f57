"""The driver's side of a worker process."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import IO, Any

from benchmarks.peers.protocol import Job

_ROOT = Path(__file__).parents[2]


class WorkerError(Exception):
    """What a worker answered instead of doing as asked, in one line."""


class Worker:
    """One peer in a process of its own. It waits in a read, using no processor time, until it is asked."""

    def __init__(self, python: Path, module: str, job: Job, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.peers.worker", module], cwd=_ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=_environment(job.threads),
            )  # fmt: skip
        self._exchange(dataclasses.asdict(job))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, do: str, **request: Any) -> Any:
        """Return the answer to a request; raises `WorkerError`."""
        return self._exchange({"do": do, **request})

    def close(self) -> None:
        """End the process."""
        _pipe(self._process.stdin).close()
        self._process.wait()
        _pipe(self._process.stdout).close()

    def _exchange(self, request: dict[str, Any]) -> Any:
        stdin, stdout = _pipe(self._process.stdin), _pipe(self._process.stdout)
        try:
            stdin.write(json.dumps(request, default=str) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise WorkerError(f"its process ended with status {self._process.wait()} (log: {self._log})")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["answer"]


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _environment(threads: int) -> dict[str, str]:
    """Return the environment of a worker: no hub, and the common thread pools limited before a library makes them."""
    pools = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return {**os.environ, **pools, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}


def cpu_seconds(pids: list[int]) -> float | None:
    """Return the processor time of processes and their children so far, None where the system does not say (/proc)."""
    ticks, left = 0, list(pids)
    try:
        while left:
            folder = Path(f"/proc/{left.pop()}")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            left += [int(pid) for path in folder.glob("task/*/children") for pid in path.read_text().split()]
    except OSError:
        return None
    return ticks / os.sysconf("SC_CLK_TCK")
