"""onnxruntime-genai: models of its own builder, plain, n-gram and draft decoding."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.protocol import DRAFT, NGRAM, Arrivals, Generation, Model, Peer, UnavailableError, folder_size

_CONFIG = "genai_config.json"
_NGRAM = 3  # the last two tokens are looked up, the continuation of their most recent occurrence is proposed
# For the builder, whose default is symmetric. An asymmetric embedding that is shared makes a graph that does not load.
_OPTIONS = {"int4-asymmetric": ["is_symmetric=false", "shared_embeddings=false"]}


class Runner(Peer):
    """Serves all modes from one model, but for a draft, which is part of the model's configuration."""

    def prepare(self) -> None:
        """Run the builder for target and draft."""
        self._build(self._job.target, [])
        if self._job.draft:
            self._build(self._job.draft, ["filename=draft.onnx"])

    def open(self) -> None:
        """Load the target, or target and draft from one folder: paths that lead out of it are refused."""
        import onnxruntime_genai

        self._library: Any = onnxruntime_genai
        folder = self._job.target.folder
        if self._job.mode == DRAFT and self._job.draft:
            folder = _compose(folder, self._job.draft.folder)
        config = onnxruntime_genai.Config(str(folder))
        block = {"session_options": {"intra_op_num_threads": self._job.threads, "inter_op_num_threads": 1}}
        roles = ("decoder", "draft") if self._job.mode == DRAFT else ("decoder",)
        config.overlay(json.dumps({"model": dict.fromkeys(roles, block)}))
        self._model: Any = onnxruntime_genai.Model(config)

    def generate(self, ids: Sequence[int], n: int, mode: str, k: int) -> Generation:
        """One call per token; tokens of an accepted block come from the library's own queue."""
        params = self._params(len(ids) + n)
        if mode == NGRAM:
            params.set_speculative_options(ngram_size=_NGRAM, max_draft_tokens=k)
        elif mode == DRAFT:
            params.set_speculative_options(max_draft_tokens=k)
        arrivals = Arrivals()
        generator = self._library.Generator(self._model, params)
        generator.append_tokens(np.array(ids, np.int32))
        count = len(ids)
        while not generator.is_done():
            generator.generate_next_token()
            new = generator.token_count()
            arrivals.add(new - count)
            count = new
        return arrivals.generation(generator.get_sequence(0)[len(ids) :])

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits of reading a prompt, which the library gives for all its tokens."""
        generator = self._library.Generator(self._model, self._params(len(ids) + 1))
        generator.append_tokens(np.array(ids, np.int32))
        rows: NDArray[np.float32] = np.asarray(generator.get_output("logits"), np.float32)[0]
        if len(rows) != len(ids):
            raise UnavailableError(f"the library gives {len(rows)} rows of logits for {len(ids)} tokens")
        return rows

    def size(self) -> int:
        """Return the bytes of the graph and its weights."""
        return folder_size(self._job.target.folder, "*.onnx*")

    def _params(self, max_length: int) -> Any:
        params = self._library.GeneratorParams(self._model)
        params.set_search_options(max_length=max_length, do_sample=False)
        return params

    def _build(self, model: Model, extra: list[str]) -> None:
        if (model.folder / _CONFIG).is_file():
            return
        options = extra + _OPTIONS.get(self._job.precision, [])
        precision = self._job.precision.partition("-")[0]
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(model.source)]
        command += ["-o", str(model.folder), "-p", precision, "-e", "cpu", "-c", str(model.folder / "cache")]
        subprocess.run([*command, *(["--extra_options", *options] if options else [])], check=True, stdout=sys.stderr)
        shutil.rmtree(model.folder / "cache", ignore_errors=True)
        # End tokens are tokens like any other here, but there has to be one: the last of the vocabulary hardly comes.
        # In the file, because an overlay of the configuration does not replace it.
        config = json.loads((model.folder / _CONFIG).read_text())
        config["model"]["eos_token_id"] = config["model"]["vocab_size"] - 1
        (model.folder / _CONFIG).write_text(json.dumps(config, indent=1))


def _compose(target: Path, draft: Path) -> Path:
    """Return a folder with the files of both, whose configuration names the draft."""
    folder = target.with_name(f"{target.name}-with-{draft.parent.name}")
    folder.mkdir(exist_ok=True)
    for path in (*target.iterdir(), *draft.iterdir()):
        if path.is_file() and not (folder / path.name).exists() and path.name != _CONFIG:
            os.link(path, folder / path.name)
    config = json.loads((target / _CONFIG).read_text())
    config["model"]["draft"] = json.loads((draft / _CONFIG).read_text())["model"]["decoder"]
    (folder / _CONFIG).write_text(json.dumps(config))
    return folder
