"""Files that a user asked for: refused before the work where they cannot be written, whole or not there after it."""

import os
from pathlib import Path

from specrt.errors import RequestError


def check_output(path: Path, *, what: str) -> None:
    """Raise `RequestError` where a file at `path` could not be written; `what` begins the message."""
    if not path.parent.is_dir():
        raise RequestError(f"{what}: expected a folder at {path.parent}, found none: make it first")
    found = path if path.exists() else path.parent
    if (path.exists() and not path.is_file()) or not os.access(found, os.W_OK):
        raise RequestError(f"{what}: {path} cannot be written: name another file")


def write_output(path: Path, text: str, *, what: str) -> None:
    """Write a text so that a reader sees all of it or what was there before; raises `RequestError` if it cannot."""
    part = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        try:
            part.write_text(text, "utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise RequestError(f"{what}: {path} cannot be written: {error.strerror}") from None


def check_folder(path: Path, *, what: str) -> None:
    """Raise `RequestError` where files could not be written to a folder at `path`, which need not be there yet."""
    if path.is_dir():
        check_output(path / "any", what=what)
    elif path.exists():
        raise RequestError(f"{what}: expected a folder at {path}, found a file: name another one")
    else:
        check_output(path, what=what)


def make_folder(path: Path, *, what: str) -> None:
    """Make a folder that is not there yet; raises `RequestError` if it cannot be made."""
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise RequestError(f"{what}: {path} cannot be made: {error.strerror}") from None
