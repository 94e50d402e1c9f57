"""Strict decoding: every type, and what the messages name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from specrt_profiles.codec import decode, encode, nearest
from specrt_profiles.errors import ProfileError, SpecRTError


@dataclass(frozen=True)
class Inner:
    size: int
    label: str = "none"


@dataclass(frozen=True)
class Outer:
    text: str
    whole: int
    number: float
    flag: bool
    choice: Literal["a", "b"]
    maybe: str | None
    either: tuple[int | str, ...]
    pairs: tuple[tuple[int, ...], ...]
    inner: Inner
    table: Mapping[str, Inner]
    names: Mapping[str, str] = field(default_factory=dict)


DATA: dict[str, Any] = {
    "text": "x",
    "whole": 3,
    "number": 1.5,
    "flag": True,
    "choice": "b",
    "maybe": None,
    "either": [1, "width"],
    "pairs": [[1, 2], []],
    "inner": {"size": 4, "label": "y"},
    "table": {"first": {"size": 1, "label": "z"}},
    "names": {"k": "v"},
}
VALUE = Outer(
    "x", 3, 1.5, True, "b", None, (1, "width"), ((1, 2), ()), Inner(4, "y"), {"first": Inner(1, "z")}, {"k": "v"}
)


def read(data: object, cls: type = Outer) -> Any:
    return decode(cls, data, where="file", error=ProfileError)


def complaint(**changes: object) -> str:
    with pytest.raises(ProfileError) as caught:
        read({**DATA, **changes})
    return str(caught.value)


def test_every_type_is_read() -> None:
    assert read(DATA) == VALUE


def test_encode_is_the_inverse_of_decode() -> None:
    assert encode(VALUE) == DATA
    assert read(encode(VALUE)) == VALUE


def test_defaults_fill_in_for_keys_that_are_left_out() -> None:
    assert read({"size": 4}, Inner) == Inner(4, "none")


def test_a_complete_table_has_no_key_left_out() -> None:
    with pytest.raises(ProfileError, match="file: the key 'label' is missing"):
        decode(Inner, {"size": 4}, where="file", error=ProfileError, complete=True)
    shorter = {**DATA, "table": {"first": {"size": 1}}}
    with pytest.raises(ProfileError, match=r"file\.table\.first: the key 'label' is missing"):
        decode(Outer, shorter, where="file", error=ProfileError, complete=True)


def test_a_whole_number_serves_as_a_float() -> None:
    value = read({**DATA, "number": 2}).number
    assert value == 2.0
    assert isinstance(value, float)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("text", 1, "file.text: expected a string, found 1"),
        ("whole", "3", "file.whole: expected a whole number, found '3'"),
        ("whole", 3.0, "file.whole: expected a whole number, found 3.0"),
        ("whole", True, "file.whole: expected a whole number, found True"),
        ("whole", None, "file.whole: expected a whole number, found None"),
        ("number", "1.5", "file.number: expected a number, found '1.5'"),
        ("number", False, "file.number: expected a number, found False"),
        ("number", 10**400, "file.number: expected a number"),
        ("flag", 1, "file.flag: expected true or false, found 1"),
        ("choice", "c", "file.choice: expected one of a, b, found 'c'"),
        ("choice", ["a"], "file.choice: expected one of a, b, found ['a']"),
        ("maybe", 5, "file.maybe: expected a string, found 5"),
        ("either", [1, 2.5], "file.either[1]: expected a whole number, found 2.5"),
        ("either", [True], "file.either[0]: expected a whole number, found True"),
        ("either", "12", "file.either: expected a list, found '12'"),
        ("pairs", [[1], [2, "3"]], "file.pairs[1][1]: expected a whole number, found '3'"),
        ("inner", 4, "file.inner: expected a table, found 4"),
        ("inner", {"size": "4"}, "file.inner.size: expected a whole number, found '4'"),
        ("inner", {}, "file.inner: the key 'size' is missing"),
        ("table", [], "file.table: expected a table, found []"),
        ("table", {"first": {"size": None}}, "file.table.first.size: expected a whole number, found None"),
        ("names", {"k": 1}, "file.names.k: expected a string, found 1"),
    ],
)
def test_a_wrong_type_is_named_by_its_full_path(key: str, value: object, text: str) -> None:
    assert complaint(**{key: value}).startswith(text)


@pytest.mark.parametrize("key", [name for name in DATA if name != "names"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ProfileError, match=f"^file: the key '{key}' is missing$"):
        read({name: value for name, value in DATA.items() if name != key})


def test_an_unknown_key_comes_with_the_nearest_known_one() -> None:
    assert complaint(wohle=1) == "file: unknown key 'wohle' (did you mean whole?)"


def test_an_unknown_key_far_from_all_comes_with_the_known_ones() -> None:
    assert complaint(inner={"size": 1, "q": 2}) == "file.inner: unknown key 'q' (known: label, size)"


def test_something_else_than_a_table_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"^file: expected a table, found \[1\]$"):
        read([1])


def test_a_long_value_is_shortened_and_stays_on_one_line() -> None:
    text = complaint(whole="line\n" * 100)
    assert len(text) < 120
    assert "\n" not in text


def test_the_error_has_the_class_that_was_asked_for() -> None:
    with pytest.raises(SpecRTError) as caught:
        decode(Inner, {}, where="x", error=SpecRTError)
    assert type(caught.value) is SpecRTError


@dataclass(frozen=True)
class Even:
    value: int

    def __post_init__(self) -> None:
        if self.value % 2:
            raise ProfileError("expected an even value")


@dataclass(frozen=True)
class Holder:
    even: Even


def test_a_refused_value_gets_the_path_and_the_error_of_the_file() -> None:
    with pytest.raises(SpecRTError) as caught:
        decode(Holder, {"even": {"value": 3}}, where="file", error=SpecRTError)
    assert type(caught.value) is SpecRTError
    assert str(caught.value) == "file.even: expected an even value"


def test_nearest_lists_close_names_or_all() -> None:
    assert nearest("cpu-int8", ["cpu", "cpu-int4", "edge"]).startswith(" (did you mean cpu-int4")
    assert nearest("zzz", ["edge", "cpu"]) == " (known: cpu, edge)"
