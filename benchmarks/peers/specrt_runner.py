"""SpecRT itself: plain decoding, also by calls of width 1, n-gram and draft model speculation, and the two combined."""

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.protocol import AUTO, DRAFT, PLAIN, PLAIN_ONE, Generation, Peer, folder_size

_DRAFTERS = {PLAIN: "none", PLAIN_ONE: "none", DRAFT: "model"}


class Runner(Peer):
    """Serves all modes from one artifact."""

    def prepare(self) -> None:
        """Export the artifact."""
        folder = self._job.target.folder
        if (folder / "manifest.json").is_file():
            return
        command = [sys.executable, "-c", "from specrt.cli import main; main()", "export", str(self._job.target.source)]
        command += ["--out", str(folder), "--precision", self._job.precision]
        if self._job.draft:
            command += ["--draft", str(self._job.draft.source), "--draft-precision", self._job.precision]
        subprocess.run(command, check=True, stdout=sys.stderr)

    def open(self) -> None:
        """Load the artifact."""
        import specrt

        self._model = specrt.load(self._job.target.folder, threads=self._job.threads)

    def generate(self, ids: Sequence[int], n: int, mode: str, k: int) -> Generation:
        """Time the whole request but for the engine's calls on the prompt.

        They read all of it but its last token, so that no token comes with them and all n are timed.
        """
        from specrt.bench import OneRowEngine

        engine = OneRowEngine(self._model.target) if mode == PLAIN_ONE else None
        start = time.perf_counter()
        options = {"max_tokens": n, "ignore_eos": True, "temperature": 0.0, **self._speculation(mode, k)}
        with self._model.start(list(ids), options, target=engine, cold=True) as stream:
            for _ in stream:
                pass
            seconds = time.perf_counter() - start
            result = stream.result
        prompt_s = result.stats.prefill_s
        return Generation(ids=list(result.token_ids), num_timed=n, decode_s=seconds - prompt_s, prompt_s=prompt_s)

    def _speculation(self, mode: str, k: int) -> dict[str, Any]:
        if mode != AUTO:
            return {"drafter": _DRAFTERS.get(mode, mode), "k": k}
        manifest = self._model.manifest
        name = "combined" if "combined" in manifest.drafter_names else manifest.default_drafter
        return {"drafter": name, "k": "auto"}

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Read the text in verify calls, which is where tokens come from."""
        engine = self._model.target
        engine.rollback(0)
        width = engine.verify_widths[-1]
        rows = [np.array(engine.verify(ids[i : i + width])) for i in range(0, len(ids), width)]
        return np.concatenate(rows)

    def size(self) -> int:
        """Return the bytes of the target's graph and weights."""
        return folder_size(self._job.target.folder, "target.onnx*")
