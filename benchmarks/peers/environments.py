"""One virtual environment per peer, made when it is missing."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.registry import PeerEntry

_ROOT = Path(__file__).parents[2]
_CONSTRAINTS = Path(__file__).with_name("constraints.txt")


def python_of(entry: PeerEntry, envs: Path, say: Callable[[str], None]) -> Path | str:
    """Return the interpreter of a peer's environment, installing it first, or why it cannot be had.

    SpecRT runs in the environment that this runs in. What pip says is kept in ENVS/NAME.log.
    """
    if not entry.requirements:
        return Path(sys.executable)
    folder = envs.absolute() / entry.name
    python, mark = folder / "bin" / "python", folder / "ready"
    wanted = "\n".join((*entry.requirements, _CONSTRAINTS.read_text()))
    if mark.is_file() and mark.read_text() == wanted:
        return python
    log = envs.absolute() / f"{entry.name}.log"
    say(f"{entry.name}: installing {', '.join(entry.requirements)} (log: {log})")
    envs.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        commands = [
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--constraint", str(_CONSTRAINTS),
             *entry.requirements],
            *([[str(python), "-m", f"benchmarks.peers.{entry.module}"]] if entry.compiled else []),
        ]  # fmt: skip
        for command in commands:
            done = subprocess.run(
                command, cwd=_ROOT, stdout=out, stderr=subprocess.STDOUT, check=False,
                env={**os.environ, **dict(entry.variables)},
            )  # fmt: skip
            if done.returncode:
                return _reason(log)
    mark.write_text(wanted)
    return python


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return f"cannot be installed: {(errors or lines or ['no output'])[-1][:200]} (log: {log})"
