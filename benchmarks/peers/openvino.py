"""openvino-genai: models read from GGUF by the library itself, plain, prompt lookup and draft decoding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.protocol import (
    DRAFT,
    NGRAM,
    PLAIN,
    Arrivals,
    Generation,
    Job,
    Model,
    Peer,
    UnavailableError,
    folder_size,
)

_NGRAM = 3  # longest n-gram that is looked up, the first match from the left
_FULL = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


class Runner(Peer):
    """Serves one mode: plain and speculative decoding are different pipelines."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads}
        if job.variant.endswith("/f32"):
            self._properties |= _FULL

    def prepare(self) -> None:
        """Have the library read the GGUF files and save what it makes of them."""
        _convert(self._job.target, self._job.precision)
        if self._job.draft:
            _convert(self._job.draft, self._job.precision)

    def open(self) -> None:
        """Load the pipeline of the job's mode."""
        import openvino
        import openvino_genai

        self._base: Any = openvino
        self._library: Any = openvino_genai
        special: dict[str, Any] = {}
        if self._job.mode == NGRAM:
            special = {"prompt_lookup": True}
        elif self._job.mode == DRAFT and self._job.draft:
            special = {
                "draft_model": openvino_genai.draft_model(str(self._job.draft.folder), "CPU", **self._properties)
            }
        self._pipeline = openvino_genai.LLMPipeline(str(self._job.target.folder), "CPU", **special, **self._properties)

    def generate(self, ids: Sequence[int], n: int, mode: str, k: int) -> Generation:
        """Take the time in a streamer, to which the library gives accepted tokens as a block."""
        config = self._library.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = n, True, False
        if mode != PLAIN:
            config.num_assistant_tokens = k
        if mode == NGRAM:
            config.max_ngram_size = _NGRAM
        streamer = _streamer(self._library)
        shape = np.array([list(ids)], np.int64)
        inputs = self._library.TokenizedInputs(self._base.Tensor(shape), self._base.Tensor(np.ones_like(shape)))
        result = self._pipeline.generate(inputs, config, streamer)
        return streamer.arrivals.generation(result.tokens[0])

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Run the saved graph token by token, as decoding does, with the same properties."""
        if self._job.mode != PLAIN:
            raise UnavailableError("taken from the plain pipeline's process")
        model = self._base.Core().compile_model(
            str(self._job.target.folder / "openvino_model.xml"), "CPU", self._properties
        )
        request, rows = model.create_infer_request(), []
        for position, token in enumerate(ids):
            feed = {
                "input_ids": np.array([[token]], np.int64),
                "attention_mask": np.ones((1, position + 1), np.int64),
                "position_ids": np.array([[position]], np.int64),
                "beam_idx": np.zeros(1, np.int32),
            }
            rows.append(request.infer(feed)["logits"][0, -1].astype(np.float32))
        return np.stack(rows)

    def size(self) -> int:
        """Return the bytes of the graph and its weights."""
        return folder_size(self._job.target.folder, "openvino_model.*")


def _convert(model: Model, precision: str) -> None:
    """Save graph and tokenizer in the folder: the library writes them beside the GGUF file it reads."""
    import openvino_genai

    if (model.folder / "openvino_model.bin").is_file():
        return
    model.folder.mkdir(parents=True, exist_ok=True)
    link = model.folder / f"{precision}.gguf"
    if not link.exists():
        link.symlink_to(Path(model.gguf).resolve())
    openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    link.unlink()


def _streamer(library: Any) -> Any:
    class Streamer(library.StreamerBase):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.arrivals = Arrivals()

        def write(self, token: int | Sequence[int]) -> Any:
            self.arrivals.add(len(token) if isinstance(token, Sequence) else 1)
            return library.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    return Streamer()
