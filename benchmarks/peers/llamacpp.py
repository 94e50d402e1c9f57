"""llama-cpp-python: GGUF files, plain, prompt lookup and draft decoding through its low-level generator."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.protocol import DRAFT, NGRAM, PLAIN, Arrivals, Generation, Peer

_NGRAM = 3  # longest n-gram that is looked up, the first match from the left


class Runner(Peer):
    """Serves one mode: with a draft the library keeps all logits, which plain decoding should not pay for."""

    def open(self) -> None:
        """Load the model of the job's mode."""
        self._drafter: Any = None
        if self._job.mode == NGRAM:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            self._drafter = LlamaPromptLookupDecoding(max_ngram_size=_NGRAM)
        elif self._job.mode == DRAFT and self._job.draft:
            self._drafter = _SecondModel(self._load(str(self._job.draft.gguf)))
        # With a drafter the library keeps all logits, but makes room for those of more than a batch only if told so.
        keep = self._drafter is not None
        self._model = self._load(str(self._job.target.gguf), draft_model=self._drafter, logits_all=keep)

    def generate(self, ids: Sequence[int], n: int, mode: str, k: int) -> Generation:
        """Take the time of every token; those of an accepted block come one after the other without a call."""
        if mode != PLAIN:
            self._drafter.num_pred_tokens = k
        self._model.reset()
        tokens: list[int] = []
        arrivals = Arrivals()
        for token in self._model.generate(list(ids), temp=0.0, top_k=1, repeat_penalty=1.0, reset=False):
            arrivals.add()
            tokens.append(token)
            if len(tokens) == n:
                break
        return arrivals.generation(tokens)

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits of one evaluation, from a second instance that keeps them all."""
        model = self._load(str(self._job.target.gguf), logits_all=True)
        model.eval(list(ids))
        rows: NDArray[np.float32] = model.scores[: len(ids)].copy()
        model.close()
        return rows

    def _load(self, path: str, **options: Any) -> Any:
        from llama_cpp import Llama

        threads = self._job.threads
        return Llama(
            path, n_ctx=self._job.context, n_threads=threads, n_threads_batch=threads, verbose=False, **options
        )


class _SecondModel:
    """A draft model as the library's drafter interface wants it, which brings none."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.num_pred_tokens = 1

    def __call__(self, input_ids: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
        tokens: list[int] = []
        for token in self._model.generate(input_ids.tolist(), temp=0.0, top_k=1, repeat_penalty=1.0, reset=True):
            tokens.append(token)
            if len(tokens) == self.num_pred_tokens:
                break
        return np.array(tokens, np.intc)
