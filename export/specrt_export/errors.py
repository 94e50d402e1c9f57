"""Errors of the export that a user can cause."""

from specrt_profiles.errors import SpecRTError


class ExportError(SpecRTError):
    """An export that cannot be done, or whose result does not match its source."""


class CheckpointError(ExportError):
    """A model that cannot be found, fetched or read."""


class UnsupportedModelError(ExportError):
    """A model that this version cannot export losslessly, with the reason."""
