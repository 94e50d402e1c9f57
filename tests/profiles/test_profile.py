"""Profiles: the built-in ones, a user's own file, and every value that is refused."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from specrt_profiles.errors import ProfileError
from specrt_profiles.profile import Profile, builtin_profiles, load_profile

BUILTIN = ("cpu", "cpu-int4", "edge")


def write(folder: Path, text: str, name: str = "mine.toml") -> str:
    path = folder / name
    path.write_text(text, "utf-8")
    return str(path)


def test_the_builtin_profiles_are_known_by_name() -> None:
    assert sorted(builtin_profiles()) == sorted(BUILTIN)


@pytest.mark.parametrize("name", BUILTIN)
def test_a_builtin_profile_says_for_what_model_and_device_it_is(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.description
    assert profile.model not in ("", "any")
    assert profile.device not in ("", "any")


@pytest.mark.parametrize("name", BUILTIN)
def test_a_builtin_profile_leaves_no_call_shape_to_a_default(name: str) -> None:
    from importlib import resources

    text = (resources.files("specrt_profiles") / "builtin" / f"{name}.toml").read_text("utf-8")
    stated = {line.partition("=")[0].strip() for line in text.splitlines()}
    assert stated == {field.name for field in fields(Profile)} - {"batch_size"}


def test_a_users_file_is_read_and_named_after_itself(tmp_path: Path) -> None:
    path = write(tmp_path, 'capacity = 96\nverify_widths = [2, 8]\nprecision = "int8"\n')
    expected = Profile(name="mine", capacity=96, verify_widths=(2, 8), precision="int8")
    assert load_profile(path) == expected


def test_a_file_needs_no_suffix_and_may_state_its_name(tmp_path: Path) -> None:
    assert load_profile(write(tmp_path, 'name = "board"\n', "plain")).name == "board"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('capacity = "96"', "mine.toml.capacity: expected a whole number, found '96'"),
        ("capacity = 96.0", "mine.toml.capacity: expected a whole number, found 96.0"),
        ("capacity = true", "mine.toml.capacity: expected a whole number, found True"),
        ("capacity = 1", "mine.toml: profile mine: capacity: expected at least 2 tokens, found 1"),
        ("capacity = -5", "mine.toml: profile mine: capacity: expected at least 2 tokens, found -5"),
        ("prefill_width = [16]", "mine.toml.prefill_width: expected a whole number, found [16]"),
        ("prefill_width = 15", "prefill_width: expected an even number from 2 on, found 15"),
        ("prefill_width = 0", "prefill_width: expected an even number from 2 on, found 0"),
        ("verify_widths = 4", "mine.toml.verify_widths: expected a list, found 4"),
        ('verify_widths = [2, "4"]', "mine.toml.verify_widths[1]: expected a whole number, found '4'"),
        ("verify_widths = []", "verify_widths: expected rising even numbers from 2 on, found []"),
        ("verify_widths = [2, 5]", "verify_widths: expected rising even numbers from 2 on, found [2, 5]"),
        ("verify_widths = [4, 2]", "verify_widths: expected rising even numbers from 2 on, found [4, 2]"),
        ("verify_widths = [2, 2]", "verify_widths: expected rising even numbers from 2 on, found [2, 2]"),
        ("verify_widths = [0, 2]", "verify_widths: expected rising even numbers from 2 on, found [0, 2]"),
        ("batch_size = 2", "batch_size: only 1 is supported, found 2"),
        ('precision = "fp8"', "mine.toml.precision: expected one of fp32, fp16, bf16, int8, int4, found 'fp8'"),
        ("trees = 1", "mine.toml.trees: expected true or false, found 1"),
        ('dialect = "trt"', "mine.toml.dialect: expected one of ort, tensorrt, found 'trt'"),
        ("draft_precision = 4", "mine.toml.draft_precision: expected one of fp32, fp16, bf16, int8, int4, found 4"),
        ("num_draft_tokens = 16", "num_draft_tokens: expected 0 to 15, the widest verify width less one, found 16"),
        ("num_draft_tokens = -1", "num_draft_tokens: expected 0 to 15, the widest verify width less one, found -1"),
        ("name = 3", "mine.toml.name: expected a string, found 3"),
        ("description = 3", "mine.toml.description: expected a string, found 3"),
        ("model = 3", "mine.toml.model: expected a string, found 3"),
        ("device = []", "mine.toml.device: expected a string, found []"),
        ("capcity = 96", "mine.toml: unknown key 'capcity' (did you mean capacity"),
        ("[prefill_width]\nvalue = 3", "mine.toml.prefill_width: expected a whole number, found {'value': 3}"),
    ],
)
def test_a_wrong_line_is_refused_with_file_and_key(tmp_path: Path, line: str, text: str) -> None:
    with pytest.raises(ProfileError) as caught:
        load_profile(write(tmp_path, line + "\n"))
    assert text in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overrides_replace_fields_and_none_leaves_them_alone() -> None:
    profile = load_profile("cpu", capacity=300, precision="int8", draft_precision=None)
    assert (profile.capacity, profile.precision) == (300, "int8")
    assert profile.draft_precision == load_profile("cpu").draft_precision
    assert profile.prefill_width == load_profile("cpu").prefill_width


def test_an_override_is_checked_like_a_file() -> None:
    with pytest.raises(ProfileError, match="profile cpu: capacity: expected at least 2 tokens, found 1"):
        load_profile("cpu", capacity=1)


def test_an_unknown_name_lists_near_names() -> None:
    with pytest.raises(ProfileError, match=r"unknown profile 'cpu-int8' \(did you mean cpu-int4"):
        load_profile("cpu-int8")


def test_an_unknown_name_far_from_all_lists_them_all() -> None:
    with pytest.raises(ProfileError, match=r"\(known: cpu, cpu-int4, edge\), or give a .toml file"):
        load_profile("xyzzy")


@pytest.mark.parametrize("content", [b"capacity = = 3\n", b"capacity", b"\xff\xfe\x00", b'name = "\xe9"\n'])
def test_a_file_that_is_no_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"broken\.toml"):
        load_profile(str(path))


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    for name in ("missing.toml", "folder.toml"):
        with pytest.raises(ProfileError, match=f"cannot read the profile .*{name}"):
            load_profile(str(tmp_path / name))


def test_kv_slots_hold_a_padded_call_at_the_last_position() -> None:
    assert Profile(name="a", capacity=100, prefill_width=64).slots == 164
    assert Profile(name="a", capacity=100, prefill_width=8, verify_widths=(2, 16)).slots == 116


def test_the_ladder_bounds_the_number_of_draft_tokens() -> None:
    assert Profile(name="a", verify_widths=(2, 6)).max_draft_tokens == 5
    assert Profile(name="a", verify_widths=(2, 6), num_draft_tokens=0).num_draft_tokens == 0


@pytest.mark.parametrize(
    ("dialect", "precision", "floats"),
    [
        ("ort", "fp32", "float32"), ("ort", "fp16", "float16"), ("ort", "int8", "float32"), ("ort", "int4", "float32"),
        ("tensorrt", "bf16", "bfloat16"), ("tensorrt", "int8", "float16"), ("tensorrt", "int4", "float16"),
    ],
)  # fmt: skip
def test_buffers_have_the_type_that_the_graph_computes_in(dialect: Any, precision: Any, floats: str) -> None:
    profile = Profile(name="mine", dialect=dialect, precision=precision)
    assert (profile.float_type, profile.kv_type) == (floats, floats)
    assert Profile(name="mine", dialect=dialect, precision=precision, kv_precision="int8").kv_type == "int8"


def test_fp32_buffers_beside_half_precision_are_refused() -> None:
    with pytest.raises(ProfileError, match="kv_precision: expected same or int8 beside precision fp16, found fp32"):
        Profile(name="mine", precision="fp16", kv_precision="fp32")
    assert Profile(name="mine", precision="int8", kv_precision="fp32").kv_type == "float32"
