"""Strict conversion between frozen dataclasses and the plain data of TOML and JSON.

Every key is checked: an unknown one is named together with its nearest known neighbour, a missing or wrong
one is named by its full path. Supported field types: `str`, `int`, `float`, `bool`, `Literal`, `X | None`,
`int | str`, `tuple[X, ...]`, `Mapping[str, X]` and other dataclasses.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union

from specrt_profiles.errors import SpecRTError

T = TypeVar("T")

OPTIONAL: Mapping[str, bool] = types.MappingProxyType({"optional": True})  # metadata of fields that came later


def decode(cls: type[T], data: object, *, where: str, error: type[SpecRTError], complete: bool = False) -> T:
    """Build the dataclass `cls` from `data`; `where` is the path that messages begin with.

    In `complete` data every key is there, also those that have defaults, but for fields that are `OPTIONAL`. Raises
    `error` for an unknown key, a missing key, a value of the wrong type or one that the dataclass itself refuses.
    """
    try:
        return typing.cast(T, _Decoder(complete).dataclass(cls, data, where))
    except _Mismatch as mismatch:
        raise error(str(mismatch)) from None


def encode(value: object) -> Any:
    """Turn dataclasses, mappings and tuples into the dicts and lists that JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    return value


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ' (did you mean X?)' for the known name closest to `name`, or the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return f" (did you mean {' or '.join(close)}?)"
    return f" (known: {', '.join(names)})"


class _Mismatch(Exception):
    pass


class _Decoder:
    """Builds values of annotated types; `complete` is `decode`'s."""

    def __init__(self, complete: bool) -> None:
        self._complete = complete

    def dataclass(self, cls: Any, data: object, where: str) -> object:
        if not isinstance(data, Mapping):
            raise _Mismatch(f"{where}: expected a table, found {_show(data)}")
        hints = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key in data:
            if key not in fields:
                raise _Mismatch(f"{where}: unknown key {str(key)!r}{nearest(str(key), fields)}")
        values = {}
        for name, field in fields.items():
            if name in data:
                values[name] = self._value(hints[name], data[name], f"{where}.{name}")
            elif self._is_required(field):
                raise _Mismatch(f"{where}: the key {name!r} is missing")
        try:
            built: object = cls(**values)
        except SpecRTError as error:
            raise _Mismatch(f"{where}: {error}") from None
        return built

    def _is_required(self, field: "dataclasses.Field[Any]") -> bool:
        if self._complete:
            return "optional" not in field.metadata
        return field.default is field.default_factory is dataclasses.MISSING

    def _value(self, hint: Any, data: object, where: str) -> object:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin in (Union, types.UnionType):
            if data is None and types.NoneType in args:
                return None
            kinds = [a for a in args if a is not types.NoneType]
            return self._value(next((a for a in kinds if type(data) is a), kinds[0]), data, where)
        if origin is Literal:
            if data not in args or isinstance(data, bool):
                raise _Mismatch(f"{where}: expected one of {', '.join(map(str, args))}, found {_show(data)}")
            return data
        if origin is tuple:
            if not isinstance(data, list | tuple):
                raise _Mismatch(f"{where}: expected a list, found {_show(data)}")
            return tuple(self._value(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
        if origin in (Mapping, dict):
            if not isinstance(data, Mapping):
                raise _Mismatch(f"{where}: expected a table, found {_show(data)}")
            return {str(key): self._value(args[1], item, f"{where}.{key}") for key, item in data.items()}
        if dataclasses.is_dataclass(hint):
            return self.dataclass(hint, data, where)
        return _scalar(hint, data, where)


_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


def _scalar(hint: Any, data: object, where: str) -> object:
    if hint is float and isinstance(data, int) and not isinstance(data, bool) and abs(data) < 1 << 1000:
        return float(data)
    if isinstance(data, hint) and (hint is bool or not isinstance(data, bool)):
        return data
    raise _Mismatch(f"{where}: expected {_NAMES[hint]}, found {_show(data)}")


def _show(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "..."
