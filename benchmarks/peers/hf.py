"""transformers on PyTorch in fp32: plain, prompt lookup and assistant decoding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.protocol import DRAFT, NGRAM, Arrivals, Generation, Peer, folder_size

_NGRAM = 3  # longest n-gram that is looked up, the first match from the left


class Runner(Peer):
    """Serves all modes from one model."""

    def open(self) -> None:
        """Load target and draft."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(self._job.threads)
        torch.set_grad_enabled(False)
        self._torch: Any = torch
        self._model, self._draft = (
            m and AutoModelForCausalLM.from_pretrained(m.source, dtype="float32").eval()
            for m in (self._job.target, self._job.draft)
        )
        for model in (self._model, self._draft):
            if model is not None:
                model.generation_config.eos_token_id = None  # an end token is a token like any other here

    def generate(self, ids: Sequence[int], n: int, mode: str, k: int) -> Generation:
        """Take the time in a streamer, to which the library gives accepted tokens as a block."""
        options: dict[str, Any] = {}
        if mode == NGRAM:
            options = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": _NGRAM}
        elif mode == DRAFT:
            settings = self._draft.generation_config
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
            settings.assistant_confidence_threshold = 0.0
            options = {"assistant_model": self._draft}
        prompt = self._torch.tensor([list(ids)])
        streamer = _Streamer()
        out = self._model.generate(
            prompt, attention_mask=self._torch.ones_like(prompt), max_new_tokens=n, do_sample=False,
            streamer=streamer, **options,
        )  # fmt: skip
        return streamer.arrivals.generation(out[0, len(ids) :].tolist())

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits of one forward call."""
        rows: NDArray[np.float32] = self._model(self._torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()
        return rows

    def size(self) -> int:
        """Return the bytes of the weights."""
        return folder_size(self._job.target.source, "*.safetensors")


class _Streamer:
    """Is given the prompt first, then tokens as they come."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self._seen_prompt = False

    def put(self, value: Any) -> None:
        if self._seen_prompt:
            self.arrivals.add(value.numel())
        self._seen_prompt = True

    def end(self) -> None:
        """Nothing is left to do."""
