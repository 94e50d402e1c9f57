"""The root of every error a user can cause."""


class SpecRTError(Exception):
    """A user's mistake or a broken input: one line with what was expected, what was found and what to do."""


class ProfileError(SpecRTError):
    """A profile that does not exist, or that holds an unknown, missing or impossible value."""


class ManifestError(SpecRTError):
    """A manifest, or a file it lists, that is missing, damaged, or of a schema this version cannot read."""


class VocabularyError(SpecRTError):
    """A draft whose token ids do not mean what the target's mean."""


class MissingExtraError(SpecRTError):
    """An optional dependency that is not installed."""
