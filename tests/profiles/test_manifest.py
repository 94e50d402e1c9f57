"""The manifest: it survives a round trip, and every way of breaking it is named in one line."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from specrt_profiles.drafter import HEADS, MODEL_FREE, DrafterKind, DrafterSpec
from specrt_profiles.errors import ManifestError
from specrt_profiles.files import FileEntry, check_hashes, sha256_of
from specrt_profiles.manifest import (
    MANIFEST_FILE,
    SCHEMA,
    EngineSpec,
    Manifest,
    ModelInfo,
    Parity,
    Vocabulary,
    read_manifest,
    write_manifest,
)
from specrt_profiles.plan import PlanSpec, call_shapes, kv_aliases
from specrt_profiles.profile import Profile
from specrt_profiles.tensors import DecoderDims, graph_inputs, graph_outputs

DIMS = DecoderDims(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, hidden_size=16, vocab_size=32)
PROFILE = Profile(name="small", capacity=64, prefill_width=8)
CONTENTS = {
    "target.onnx": b"graph",
    "target.onnx.data": b"weights",
    "target.reference.npz": b"reference",
    "draft.onnx": b"smaller graph",
    "draft.onnx.data": b"smaller weights",
    "draft.reference.npz": b"another reference",
    "tokenizer.json": b"{}",
    "generation.json": b"{}",
}
Keys = tuple[str | int, ...]


def engine(name: str) -> EngineSpec:
    return EngineSpec(
        dialect="ort",
        file=f"{name}.onnx",
        weights=f"{name}.onnx.data",
        reference=f"{name}.reference.npz",
        model=ModelInfo(
            name=name, source="a folder", revision=None, architecture="Llama", licence="mit", num_parameters=9
        ),
        precision="fp32",
        capacity=PROFILE.capacity,
        slots=PROFILE.slots,
        prefill_width=PROFILE.prefill_width,
        verify_widths=PROFILE.verify_widths,
        vocab_size=DIMS.vocab_size,
        weight_bytes=1000,
        inputs=graph_inputs(DIMS, PROFILE),
        outputs=graph_outputs(DIMS, PROFILE),
        parity=Parity(
            num_rows=7,
            max_abs_diff=1e-5,
            mean_kl=0.0,
            max_kl=0.0,
            top1_agreement=1.0,
            perplexity=9.0,
            source_perplexity=9.0,
        ),
        exact_widths=(2, 4),
    )


def write_artifact(folder: Path) -> Manifest:
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
    manifest = Manifest(
        profile=PROFILE,
        vocabulary=Vocabulary(
            num_tokens=32, fingerprint="f" * 64, eos_token_ids=(0, 3), special_tokens={"eos_token": "ünd"}
        ),
        engines={"target": engine("target"), "draft": engine("draft")},
        drafters={
            "ngram": DrafterSpec(kind="ngram"),
            "model": DrafterSpec(kind="model", engine="draft", vocabulary="f" * 64),
        },
        default_drafter="model",
        tools={"specrt": "0.1.0"},
        files={name: FileEntry(size=len(data), sha256=sha256_of(folder / name)) for name, data in CONTENTS.items()},
    )
    write_manifest(folder, manifest)
    return manifest


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    write_artifact(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    write_artifact(folder)
    return folder


def content(folder: Path) -> Any:
    return json.loads((folder / MANIFEST_FILE).read_text("utf-8"))


def walk(data: Any, keys: Keys = ()) -> Iterator[Keys]:
    """Yield the path of every value below the root."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*keys, key)
        yield from walk(value, (*keys, key))


def at(data: Any, keys: Keys) -> Any:
    for key in keys:
        data = data[key]
    return data


def dotted(keys: Keys) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)


def complaint(folder: Path, data: Any) -> str:
    (folder / MANIFEST_FILE).write_text(json.dumps(data), "utf-8")
    with pytest.raises(ManifestError) as caught:
        read_manifest(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


def edited(folder: Path, change: Callable[[Any], object]) -> str:
    data = content(folder)
    change(data)
    return complaint(folder, data)


def test_a_manifest_survives_a_round_trip(tmp_path: Path) -> None:
    manifest = write_artifact(tmp_path)
    assert read_manifest(tmp_path) == manifest
    assert manifest.target is manifest.engines["target"]


def wrong_values(value: object, keys: Keys) -> list[object]:
    """Return JSON values that cannot stand where `value` stands."""
    wrong: list[object] = [{"x": []}, [{}], 1.25, True]
    if isinstance(value, int | float) and "shape" not in keys:
        wrong.append("12")
    return [other for other in wrong if type(other) is not type(value)]


def test_every_value_of_another_type_is_named_by_its_path(shared: Path) -> None:
    original = content(shared)
    paths = list(walk(original))
    assert len(paths) > 150
    for keys in paths:
        for wrong in wrong_values(at(original, keys), keys):
            data = copy.deepcopy(original)
            at(data, keys[:-1])[keys[-1]] = wrong
            text = complaint(shared, data)
            if keys not in {("format",), ("schema",)}:
                assert dotted(keys) in text, (keys, wrong, text)


def is_entry(keys: Keys) -> bool:
    """Tell whether a path is an entry of a list or of a table with free names: leaving it out breaks no type."""
    tables = ({"engines"}, {"heads"}, {"drafters"}, {"tools"}, {"files"}, {"vocabulary", "special_tokens"})
    return isinstance(keys[-1], int) or set(map(str, keys[:-1])) in tables


def may_be_absent(keys: Keys) -> bool:
    """Tell whether artifacts written before a key came to be are read without it."""
    places = {(where, key) for where in ("engines", "heads") for key in ("plan", "exit")}
    places |= {("drafters", "tokens"), ("drafters", "tree")}
    return keys in {("heads",), ("profile", "output")} or (len(keys) == 3 and (keys[0], keys[2]) in places)


def test_every_key_left_out_is_named(shared: Path) -> None:
    original = content(shared)
    paths = [keys for keys in walk(original) if not is_entry(keys) and not may_be_absent(keys)]
    assert len(paths) > 100
    for keys in paths:
        data = copy.deepcopy(original)
        del at(data, keys[:-1])[keys[-1]]
        text = complaint(shared, data)
        if keys not in {("format",), ("schema",)}:
            assert f"{dotted(keys[:-1])}: the key {keys[-1]!r} is missing" in text, (keys, text)


def test_an_artifact_from_before_plans_is_read(artifact: Path) -> None:
    data = content(artifact)
    for entry in data["engines"].values():
        assert entry.pop("plan") is None
    (artifact / MANIFEST_FILE).write_text(json.dumps(data), "utf-8")
    assert read_manifest(artifact).target.plan is None


def test_an_artifact_from_before_the_choice_of_outputs_is_read(artifact: Path) -> None:
    data = content(artifact)
    assert data["profile"].pop("output") == "logits"
    (artifact / MANIFEST_FILE).write_text(json.dumps(data), "utf-8")
    assert read_manifest(artifact).profile.output == read_manifest(artifact).target.output == "logits"


def test_an_artifact_whose_graph_says_the_best_tokens_but_no_sum_is_refused(artifact: Path) -> None:
    outputs = [asdict(tensor) for tensor in graph_outputs(DIMS, replace(PROFILE, output="top-k"))]

    def change(data: Any) -> None:
        data["engines"]["draft"]["outputs"] = [entry for entry in outputs if entry["name"] != "top_logsumexp"]

    assert edited(artifact, change).endswith(
        "draft.outputs: expected top_logsumexp beside top_ids, found none, as older versions wrote: export it again"
    )
    data = content(artifact)
    data["engines"]["draft"]["outputs"] = outputs
    (artifact / MANIFEST_FILE).write_text(json.dumps(data), "utf-8")
    assert read_manifest(artifact).engines["draft"].output == "top-k"


def with_a_plan(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    target = manifest.target
    plan = PlanSpec(
        builder="tensorrt-rtx", version="1.7", compute_capabilities=("8.6", "8.9"), output="logits", source="0" * 64,
        shapes=call_shapes(target.prefill_width, target.verify_widths, with_decode=False),
        aliases=kv_aliases(target.inputs),
    )  # fmt: skip
    engine = replace(target, dialect="tensorrt", plan=plan)
    return replace(manifest, engines={**manifest.engines, "target": engine})


def test_a_plan_survives_a_round_trip(artifact: Path) -> None:
    manifest = with_a_plan(artifact)
    write_manifest(artifact, manifest)
    assert read_manifest(artifact) == manifest


def test_a_plan_that_does_not_fit_its_engine_is_refused(artifact: Path) -> None:
    manifest = with_a_plan(artifact)
    write_manifest(artifact, manifest)
    text = edited(artifact, lambda data: data["engines"]["target"]["plan"]["shapes"].pop())
    assert "engines.target.plan.shapes: expected prefill 8 and verify [2, 4, 6, 10, 16], found" in text
    write_manifest(artifact, manifest)
    text = edited(artifact, lambda data: data["engines"]["target"].update(dialect="ort"))
    assert "engines.target.plan: expected the dialect tensorrt, found ort" in text


def test_every_table_refuses_a_key_it_does_not_know(shared: Path) -> None:
    original = content(shared)
    tables = [keys for keys in walk(original) if isinstance(at(original, keys), dict) and not is_entry((*keys, "x"))]
    for keys in [(), *tables]:
        data = copy.deepcopy(original)
        at(data, keys)["surprise"] = 1
        assert f"{dotted(keys)}: unknown key 'surprise'" in complaint(shared, data)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_an_engine_that_something_refers_to_must_be_there(artifact: Path, name: str) -> None:
    text = edited(artifact, lambda data: data["engines"].pop(name))
    assert f"named '{name}'" in text


@pytest.mark.parametrize("key", ["file", "weights", "reference"])
@pytest.mark.parametrize("name", ["target", "draft"])
def test_an_engines_files_must_be_listed(artifact: Path, name: str, key: str) -> None:
    text = edited(artifact, lambda data: data["files"].pop(data["engines"][name][key]))
    assert f"engines.{name}.{key}: " in text
    assert "is not among the listed files" in text


def test_the_default_drafter_must_be_one_of_the_drafters(artifact: Path) -> None:
    text = edited(artifact, lambda data: data.update(default_drafter="eagle"))
    assert "default_drafter: 'eagle' is not among the drafters" in text


@pytest.mark.parametrize("kind", MODEL_FREE)
def test_drafters_that_need_no_files_are_always_there(artifact: Path, kind: str) -> None:
    data = content(artifact)
    data["drafters"].pop("ngram")
    data["default_drafter"] = kind
    (artifact / MANIFEST_FILE).write_text(json.dumps(data), "utf-8")
    manifest = read_manifest(artifact)
    assert list(manifest.drafters) == ["model"]
    assert list(manifest.all_drafters) == ["ngram", "suffix", "model"]
    assert manifest.default_k(kind) == PROFILE.max_draft_tokens
    assert (manifest.default_k("model"), manifest.default_k("none")) == (PROFILE.num_draft_tokens,) * 2


def test_an_artifact_that_lists_ngram_has_the_others_too(artifact: Path) -> None:
    assert set(read_manifest(artifact).drafters) == {"ngram", "model"}
    assert list(read_manifest(artifact).all_drafters) == ["ngram", "suffix", "model"]


def test_no_drafter_is_a_default_too(artifact: Path) -> None:
    write_manifest(artifact, replace(read_manifest(artifact), default_drafter="none"))
    assert read_manifest(artifact).default_drafter == "none"


def test_a_draft_made_for_another_vocabulary_is_refused(artifact: Path) -> None:
    text = edited(artifact, lambda data: data["drafters"]["model"].update(vocabulary="0" * 64))
    assert f"drafters.model: made for vocabulary {'0' * 64}, the target has {'f' * 64}" in text


def test_a_drafter_must_name_an_engine(artifact: Path) -> None:
    text = edited(artifact, lambda data: data["drafters"]["model"].update(engine=None))
    assert "drafters.model.engine: no draft engine is named None" in text


def test_the_target_is_no_draft(artifact: Path) -> None:
    text = edited(artifact, lambda data: data["drafters"]["model"].update(engine="target"))  # it has one KV buffer
    assert "drafters.model.engine: no draft engine is named 'target'" in text


@pytest.mark.parametrize("token", [-1, 10**9])
def test_an_end_token_outside_the_vocabulary_is_refused(artifact: Path, token: int) -> None:
    text = edited(artifact, lambda data: data["vocabulary"].update(eos_token_ids=[token]))
    assert "vocabulary.eos_token_ids: expected ids below" in text
    assert f"found {token}" in text


@pytest.mark.parametrize("dim", ["heads", 0])
def test_kv_buffers_have_fixed_sizes(artifact: Path, dim: object) -> None:
    def change(data: Any) -> None:
        next(spec for spec in data["engines"]["target"]["inputs"] if spec["name"] == "past_key.0")["shape"][1] = dim

    assert "past_key.0: expected a shape of fixed sizes" in edited(artifact, change)


def test_a_path_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="cannot be read: File name too long"):
        read_manifest(tmp_path / ("a" * 300))
    (tmp_path / "file").write_text("x")
    with pytest.raises(ManifestError, match=r"no manifest\.json there"):
        read_manifest(tmp_path / "file")


def test_a_listed_name_that_is_too_long_is_one_line(artifact: Path) -> None:
    name = "a" * 300
    text = edited(artifact, lambda data: data["files"].update({name: {"size": 1, "sha256": "0"}}))
    assert "cannot be read: File name too long" in text


def test_a_value_that_a_profile_refuses_is_a_manifest_error(artifact: Path) -> None:
    text = edited(artifact, lambda data: data["profile"].update(batch_size=2))
    assert ".profile: profile small: batch_size: only 1 is supported" in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"verify_widths": []}, "verify_widths: expected rising numbers from 1 on, found []"),
        ({"verify_widths": [4, 2]}, "verify_widths: expected rising numbers from 1 on, found [4, 2]"),
        ({"verify_widths": [0, 2]}, "verify_widths: expected rising numbers from 1 on, found [0, 2]"),
        ({"prefill_width": 0}, "capacity: expected positive sizes, found 64 with prefill_width 0"),
        ({"capacity": -1}, "capacity: expected positive sizes, found -1"),
        ({"capacity": 4096}, "slots: expected 4112, capacity and widest call together, found 80"),
        ({"slots": 64}, "slots: expected 80, capacity and widest call together, found 64"),
        ({"capacity": 32, "slots": 48}, "past_key.0: expected 48 in dimension 2 of its shape, found [1, 1, 80, 8]"),
        ({"vocab_size": 31}, "logits: expected 31 in dimension 2 of its shape, found [1, 'rows', 32]"),
    ],
)
def test_sizes_of_an_engine_that_contradict_each_other_are_refused(
    artifact: Path, change: dict[str, object], text: str
) -> None:
    assert f"engines.draft.{text}" in edited(artifact, lambda data: data["engines"]["draft"].update(change))


def test_a_newer_schema_asks_for_an_upgrade(artifact: Path) -> None:
    text = edited(artifact, lambda data: data.update(schema=SCHEMA + 1, new_key={}))
    assert f"schema {SCHEMA + 1} is newer than {SCHEMA}" in text
    assert "upgrade SpecRT" in text


@pytest.mark.parametrize(
    "change", [{"format": "other"}, {"format": None}, {"schema": 0}, {"schema": "1"}, {"schema": True}]
)
def test_another_format_or_schema_is_refused(artifact: Path, change: dict[str, object]) -> None:
    text = edited(artifact, lambda data: data.update(change))
    assert "expected" in text
    assert repr(next(iter(change.values()))) in text


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"x"', "null", "\ufeff{}", "[" * 100_000])
def test_something_else_than_a_json_object_is_refused(artifact: Path, text: str) -> None:
    (artifact / MANIFEST_FILE).write_text(text, "utf-8")
    with pytest.raises(ManifestError, match=MANIFEST_FILE):
        read_manifest(artifact)


def test_bytes_that_are_no_utf8_are_refused(artifact: Path) -> None:
    (artifact / MANIFEST_FILE).write_bytes(b'{"format": "\xff"}')
    with pytest.raises(ManifestError, match="not readable as JSON"):
        read_manifest(artifact)


def test_a_folder_without_manifest_says_what_was_expected(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ManifestError, match=r"no manifest\.json there: expected a folder written by"):
            read_manifest(folder)


@pytest.mark.parametrize("name", sorted(CONTENTS))
def test_a_missing_file_is_named(artifact: Path, name: str) -> None:
    (artifact / name).unlink()
    with pytest.raises(ManifestError, match=f"/{name}: listed in the manifest but missing"):
        read_manifest(artifact)


@pytest.mark.parametrize("name", sorted(CONTENTS))
def test_a_file_of_another_size_is_named_with_both_sizes(artifact: Path, name: str) -> None:
    size = len(CONTENTS[name])
    (artifact / name).write_bytes(CONTENTS[name] + b"!")
    with pytest.raises(ManifestError, match=f"/{name}: expected {size} bytes, found {size + 1}"):
        read_manifest(artifact)


@pytest.mark.parametrize("name", sorted(CONTENTS))
def test_changed_content_of_the_same_size_is_found_by_its_hash(artifact: Path, name: str) -> None:
    manifest = read_manifest(artifact)
    check_hashes(artifact, manifest.files)
    (artifact / name).write_bytes(b"?" + CONTENTS[name][1:])
    read_manifest(artifact)
    with pytest.raises(ManifestError, match=f"/{name}: expected SHA-256 {manifest.files[name].sha256}, found"):
        check_hashes(artifact, manifest.files)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", ".", "..", "", "x/", "./x"])
def test_names_that_lead_out_of_the_folder_are_refused(artifact: Path, name: str) -> None:
    (artifact.parent / "x").write_bytes(b"outside")
    text = edited(artifact, lambda data: data["files"].update({name: {"size": 7, "sha256": "0" * 64}}))
    assert f"{name!r} is not a plain file name" in text


def test_an_engine_cannot_read_a_file_outside_the_folder(artifact: Path) -> None:
    text = edited(artifact, lambda data: data["engines"]["target"].update(file="../target.onnx"))
    assert "engines.target.file: '../target.onnx' is not among the listed files" in text


@pytest.mark.parametrize("name", ["tokenizer.json", "generation.json"])
def test_files_every_artifact_needs_must_be_listed(artifact: Path, name: str) -> None:
    assert f"files: expected {name} among them" in edited(artifact, lambda data: data["files"].pop(name))


def test_what_can_be_combined_and_what_can_be_replayed(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    assert manifest.drafter_names == ("ngram", "suffix", "model", "combined")
    assert not any(manifest.reads_target(name) for name in (*manifest.drafter_names, "none"))
    assert [manifest.parts(name) for name in ("combined", "ngram+model", "suffix+model")] == [
        ("suffix", "model"), ("ngram", "model"), ("suffix", "model"),
    ]  # fmt: skip
    for name in ("model", "model+ngram", "ngram+suffix", "ngram+none", "ngram+", "none"):
        assert manifest.parts(name) is None
    assert replace(manifest, drafters={}).drafter_names == ("ngram", "suffix")
    for kind in HEADS:
        head = DrafterSpec(kind=kind, engine="head", vocabulary="f" * 64)
        headed = replace(manifest, heads={"head": engine("target")}, drafters={kind: head})
        assert headed.drafter_names == ("ngram", "suffix", kind, "combined")
        found = [name for name in (*headed.drafter_names, f"ngram+{kind}") if headed.reads_target(name)]
        assert found == [kind, "combined", f"ngram+{kind}"]


@pytest.mark.parametrize("kind", HEADS)
def test_what_the_drafter_of_a_head_needs(artifact: Path, kind: DrafterKind) -> None:
    manifest = read_manifest(artifact)
    good = DrafterSpec(kind=kind, engine="head", vocabulary="f" * 64, tokens="tokenizer.json")
    for drafter, text in (
        (good, None),
        (replace(good, engine="target"), f"drafters.{kind}.engine: no head is named 'target'"),
        (replace(good, tokens="none.npy"), f"drafters.{kind}.tokens: 'none.npy' is not among the listed files"),
        (replace(good, vocabulary="0"), f"drafters.{kind}: made for vocabulary 0, the target has ffff"),
        (replace(good, tree=((0,), (0, 0), (1,), (0, 3), (0, 3, 1))), None),
        (replace(good, tree=((0,), (1, 0))), f"drafters.{kind}.tree: expected each node once and after the one"),
        (replace(good, tree=((0,), (0,))), "found [0]"),
        (replace(good, tree=((0,), (-1,))), "found [-1]"),
        (replace(good, tree=((),)), "found []"),
    ):
        heads, drafters = {"head": engine("target")}, {kind: drafter}
        write_manifest(artifact, replace(manifest, heads=heads, drafters=drafters, default_drafter="none"))
        if text is None:
            assert read_manifest(artifact).drafters[kind] == drafter
        else:
            with pytest.raises(ManifestError) as error:
                read_manifest(artifact)
            assert text in str(error.value)
