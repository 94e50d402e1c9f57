"""SpecRT: lossless speculative decoding from a self-contained artifact, with NumPy and an inference engine.

import specrt

with specrt.load("artifacts/smollm2-135m") as model:
    for token in model.stream([{"role": "user", "content": "Why is the sky blue?"}], max_tokens=100):
        print(token.text, end="", flush=True)
"""

from typing import Any

from specrt.errors import BusyError, EngineError, ManifestError, MissingExtraError, RequestError, SpecRTError, TextError
from specrt.language_model import LanguageModel, load
from specrt.loop import Token, TokenLogprob
from specrt.sampling import SamplingParams
from specrt.stats import Statistics
from specrt.stream import Result, Stream

__all__ = [
    "BusyError",
    "EngineError",
    "LanguageModel",
    "ManifestError",
    "MissingExtraError",
    "RequestError",
    "Result",
    "SamplingParams",
    "SpecRTError",
    "Statistics",
    "Stream",
    "TextError",
    "Token",
    "TokenLogprob",
    "load",
]


def __getattr__(name: str) -> Any:
    """Look up `__version__` when it is asked for: reading the metadata takes longer than the rest of the import."""
    if name != "__version__":
        raise AttributeError(f"module 'specrt' has no attribute {name!r}")
    from importlib.metadata import version

    return version("specrt")
