"""Profiles: the shapes and the precision that an export fixes for good."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

from specrt_profiles.codec import OPTIONAL, decode, nearest
from specrt_profiles.errors import ProfileError

Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]
KvPrecision = Literal["same", "fp32", "int8"]
DialectName = Literal["ort", "tensorrt"]
OutputName = Literal["logits", "argmax", "top-k"]
FloatName = Literal["float32", "float16", "bfloat16"]
KvName = Literal["float32", "float16", "bfloat16", "int8"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_FLOATS: Mapping[Precision, FloatName] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_QUANTIZED: Mapping[DialectName, FloatName] = {"ort": "float32", "tensorrt": "float16"}  # what these compute in


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Call shapes, capacity, precision and operators of an artifact.

    `capacity` is the longest sequence (prompt and generated tokens together) that can be held. `verify_widths`
    is the ladder of widths, in tokens, that a verify call may have: a proposal of k tokens takes the smallest
    width >= k + 1. Widths are even because a row's bits were measured to be the same for every even width, while
    width 1 and odd widths may take other kernels. `num_draft_tokens` is the k of a draft model if a request names none.
    `dialect` says whose operators the graphs are made of, see `specrt_profiles.tensors`. `kv_precision` is `int8` or
    `same`, the type that the graph computes in (for which `fp32` is another name where that is the type). `trees`: the
    target can verify trees of proposals, for which every call pays a little. `output`: `argmax` for graphs that also
    say each row's best token, so that an engine on a GPU leaves logits there until they are used; `top-k` for graphs
    that say its best 64 and the sum over all as well.
    """

    name: str
    description: str = ""
    model: str = "any"
    device: str = "any"
    capacity: int = 2048
    prefill_width: int = 64
    verify_widths: tuple[int, ...] = (2, 4, 6, 10, 16)
    batch_size: int = 1
    precision: Precision = "fp32"
    draft_precision: Precision = "int4"
    kv_precision: KvPrecision = "same"
    dialect: DialectName = "ort"
    num_draft_tokens: int = 5
    trees: bool = False
    output: OutputName = field(default="logits", metadata=OPTIONAL)

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise ProfileError(f"profile {self.name}: {problem}")

    @property
    def max_draft_tokens(self) -> int:
        """The largest k that the ladder can verify."""
        return self.verify_widths[-1] - 1

    @property
    def float_type(self) -> FloatName:
        """The type that graphs compute in, between products and in them."""
        return _FLOATS.get(self.precision) or _QUANTIZED[self.dialect]

    @property
    def kv_type(self) -> KvName:
        """The type of the KV buffers."""
        return "int8" if self.kv_precision == "int8" else self.float_type

    @property
    def slots(self) -> int:
        """Length of a KV buffer in tokens: a padded call at the last position must fit as well."""
        return self.capacity + max(self.prefill_width, *self.verify_widths)

    def _problem(self) -> str | None:
        widths = list(self.verify_widths)
        if not widths or any(w < 2 or w % 2 for w in widths) or widths != sorted(set(widths)):
            return f"verify_widths: expected rising even numbers from 2 on, found {widths}"
        if self.prefill_width < 2 or self.prefill_width % 2:
            return f"prefill_width: expected an even number from 2 on, found {self.prefill_width}"
        if self.capacity < 2:
            return f"capacity: expected at least 2 tokens, found {self.capacity}"
        if self.batch_size != 1:
            return f"batch_size: only 1 is supported, found {self.batch_size}"
        if not 0 <= self.num_draft_tokens <= self.max_draft_tokens:
            limit = f"0 to {self.max_draft_tokens}, the widest verify width less one"
            return f"num_draft_tokens: expected {limit}, found {self.num_draft_tokens}"
        if self.kv_precision == "fp32" and self.float_type != "float32":
            return f"kv_precision: expected same or int8 beside precision {self.precision}, found fp32"
        return None


def builtin_profiles() -> dict[str, Profile]:
    """Return the profiles that ship with SpecRT, by name."""
    folder = resources.files("specrt_profiles") / "builtin"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    profiles = (_parse(f.read_text("utf-8"), f.name) for f in files)
    return {profile.name: profile for profile in profiles}


def load_profile(name_or_path: str, **overrides: object) -> Profile:
    """Load a built-in profile by name or a TOML file by path, and replace the fields in `overrides`.

    Overrides that are None are left alone. Raises `ProfileError` for an unknown name (with near names), an
    unreadable file, or any key or value that is not a profile's.
    """
    path = Path(name_or_path)
    known = builtin_profiles()
    if name_or_path in known:
        profile = known[name_or_path]
    elif path.suffix == ".toml" or path.is_file():
        try:
            profile = _parse(path.read_text("utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"cannot read the profile {path}: {error}") from None
    else:
        raise ProfileError(f"unknown profile {name_or_path!r}{nearest(name_or_path, known)}, or give a .toml file")
    return replace(profile, **{k: v for k, v in overrides.items() if v is not None})  # type: ignore[arg-type]


def _parse(text: str, where: str) -> Profile:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"{where}: not valid TOML: {error}") from None
    data.setdefault("name", Path(where).stem)
    return decode(Profile, data, where=where, error=ProfileError)
