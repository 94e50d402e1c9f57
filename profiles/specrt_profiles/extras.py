"""Optional dependencies: name the line that installs what is missing."""

from importlib.util import find_spec

from specrt_profiles.errors import MissingExtraError


def require(extra: str, *modules: str) -> None:
    """Raise `MissingExtraError` with the install line unless all `modules` of the extra can be found."""
    missing = [name for name in modules if not _is_found(name)]
    if missing:
        raise MissingExtraError(f"{', '.join(missing)} not installed: run  pip install 'specrt[{extra}]'")


def _is_found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package that a dotted name is in
        return False
