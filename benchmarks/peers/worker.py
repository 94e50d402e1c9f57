"""One peer in one process: JSON lines in, JSON lines out, blocked on a read while others run.

Started by the driver in the peer's environment:  python -m benchmarks.peers.worker MODULE,  the job as first line.
"""

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.protocol import Job, Model, Peer


def main(module: str) -> None:
    """Serve requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output; only answers may arrive there
    peer: Peer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if peer is None:
                peer = importlib.import_module(f"benchmarks.peers.{module}").Runner(parse_job(request))
                answer: Any = True
            else:
                answer = _answer(peer, request)
            reply = {"answer": answer}
        except Exception as error:  # whatever a library raises becomes a note in the table
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        print(json.dumps(reply), file=answers, flush=True)


def parse_job(data: dict[str, Any]) -> Job:
    """Return the job of its JSON form."""
    models = {
        role: data[role] and Model(**{name: Path(path) for name, path in data[role].items()})
        for role in ("target", "draft")
    }
    return Job(**{**data, **models})


def _answer(peer: Peer, request: dict[str, Any]) -> Any:
    match request.pop("do"):
        case "generate":
            return dataclasses.asdict(peer.generate(**request))
        case "logits":
            np.save(request["path"], peer.logits(request["ids"]).astype(np.float32))
            return True
        case "size":
            return peer.size()
        case "open":
            return peer.open()
        case "prepare":
            return peer.prepare()
        case other:
            raise ValueError(f"unknown request {other!r}")


if __name__ == "__main__":
    main(sys.argv[1])
