"""Errors of the run time that a user can cause."""

from specrt_profiles.errors import (
    ManifestError,
    MissingExtraError,
    ProfileError,
    SpecRTError,
    VocabularyError,
)


class EngineError(SpecRTError):
    """An engine that cannot be opened, or whose files do not fit their manifest."""


class RequestError(SpecRTError):
    """A request that cannot be served as asked: an impossible parameter, or a prompt that does not fit."""


class BusyError(SpecRTError):
    """A second request while one is being served, or use in a process other than the one that loaded."""


class TextError(SpecRTError):
    """A chat template or a tokenizer that fails on the given text."""


__all__ = [
    "BusyError",
    "EngineError",
    "ManifestError",
    "MissingExtraError",
    "ProfileError",
    "RequestError",
    "SpecRTError",
    "TextError",
    "VocabularyError",
]
