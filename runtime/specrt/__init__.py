"""SpecRT: lossless speculative decoding from a self-contained artifact, with NumPy and an inference engine.

import specrt

with specrt.load("artifacts/smollm2-135m") as model:
    for token in model.stream([{"role": "user", "content": "Why is the sky blue?"}], max_tokens=100):
        print(token.text, end="", flush=True)
"""

from specrt.errors import SpecRTError
from specrt.language_model import LanguageModel, Result, Stream, load
from specrt.loop import Token, TokenLogprob
from specrt.sampling import SamplingParams
from specrt.stats import Statistics

__all__ = [
    "LanguageModel",
    "Result",
    "SamplingParams",
    "SpecRTError",
    "Statistics",
    "Stream",
    "Token",
    "TokenLogprob",
    "load",
]
