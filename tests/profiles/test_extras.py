"""Optional dependencies that are missing."""

import pytest

from specrt_profiles.errors import MissingExtraError
from specrt_profiles.extras import require


def test_installed_modules_are_fine() -> None:
    require("export", "json", "numpy")


def test_what_is_missing_comes_with_the_line_that_installs_it() -> None:
    with pytest.raises(
        MissingExtraError, match=r"^no_such_a, no_such_b not installed: run  pip install 'specrt\[cpu\]'"
    ):
        require("cpu", "json", "no_such_a", "no_such_b")


def test_a_module_of_a_missing_package_is_missing() -> None:
    with pytest.raises(MissingExtraError, match=r"^no_such_a\.b not installed"):
        require("cpu", "json.decoder", "no_such_a.b")
