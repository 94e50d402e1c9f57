"""Plans by TensorRT-RTX, which needs no GPU to build them: what they are built for, and everything that is refused."""

import gc
import io
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

import tiny
from copies import copy_artifact, edit_manifest, refresh
from real import exported
from specrt.cli import main
from specrt_export import builder
from specrt_export.builder import Builder, BuildOptions, PlanError
from specrt_export.errors import ExportError
from specrt_export.plan import PlanRequest, build_plan, default_out
from specrt_export.progress import Phases, Progress
from specrt_profiles.errors import ManifestError, MissingExtraError
from specrt_profiles.files import check_hashes, sha256_of
from specrt_profiles.manifest import read_manifest
from specrt_profiles.plan import PlanShape, call_shapes, kv_aliases

trt: Any = pytest.importorskip("tensorrt_rtx", reason="not installed: pip install 'specrt[tensorrt-rtx]'")
pytestmark = pytest.mark.usefixtures("frozen_heap")  # each test ends with a collection

RTX = BuildOptions(builder="tensorrt-rtx")
ADA = BuildOptions(builder="tensorrt-rtx", compute_capabilities=("8.9",))


def build(artifact: Path, out: Path, options: BuildOptions = RTX, **request: Any) -> Path:
    wanted = PlanRequest(artifact=artifact, out=out, options=options, **request)
    return build_plan(wanted, Progress(stream=io.StringIO()))


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in sorted(folder.iterdir())}


def contents(plan: Path) -> list[int]:
    """Return how often each byte occurs: TensorRT-RTX writes the records of outputs in the order of their addresses."""
    counts: list[int] = np.bincount(np.frombuffer(plan.read_bytes(), np.uint8), minlength=256).tolist()
    return counts


def header(plan: Path) -> tuple[bytes, bytes, int]:
    """Return mark, version and the bits of the compute capabilities: not documented, seen in TensorRT-RTX 1.7."""
    content = plan.read_bytes()[:64]
    return content[:4], content[24:28], struct.unpack_from("<I", content, 32)[0]


@pytest.fixture(autouse=True)
def no_builder_is_left() -> Iterator[None]:
    """All builders of a process share the first one's logger; those of failed builds hang in their tracebacks."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def source(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Llama in fp16 for TensorRT, with itself at int4 as draft."""
    profile = tiny.profile(dialect="tensorrt", precision="fp16")
    return tiny.export_tiny(
        tiny_source, tmp_path_factory.mktemp("half") / "tiny", draft=str(tiny_source), profile=profile
    )


@pytest.fixture(scope="module")
def plans(source: Path) -> Path:
    """Its plans, beside it."""
    return build(source, default_out(source))


def test_a_plan_is_an_artifact_of_its_own(source: Path, plans: Path) -> None:
    assert plans == source.with_name("tiny-plan")
    manifest, before = read_manifest(plans), read_manifest(source)
    check_hashes(plans, manifest.files)
    assert {path.name for path in plans.iterdir()} == {
        "manifest.json", "target.plan", "draft.plan", "target.reference.npz", "draft.reference.npz", "tokenizer.json",
        "generation.json", "chat_template.jinja",
    }  # fmt: skip
    assert manifest.tools == {**before.tools, "tensorrt-rtx": trt.__version__}
    assert (manifest.vocabulary, manifest.drafters, manifest.profile) == (
        before.vocabulary, before.drafters, before.profile,
    )  # fmt: skip


def test_its_facts_are_those_of_the_engine_it_was_built_from(source: Path, plans: Path) -> None:
    for name, spec in read_manifest(plans).engines.items():
        before = read_manifest(source).engines[name]
        plan = spec.plan
        assert plan is not None
        assert (spec.file, spec.weights) == (f"{name}.plan", f"{name}.plan")
        assert (spec.inputs, spec.outputs, spec.parity) == (before.inputs, before.outputs, before.parity)
        assert (plan.builder, plan.version, plan.compute_capabilities) == ("tensorrt-rtx", trt.__version__, ())
        assert plan.shapes == call_shapes(16, (2, 4, 6, 10, 16), with_decode=False)
        assert plan.aliases == kv_aliases(before.inputs)
        assert len(plan.aliases) == 4
        assert plan.source == sha256_of(source / "manifest.json")


def test_building_again_gives_the_same_plan_and_touches_nothing(source: Path, plans: Path, tmp_path: Path) -> None:
    before = hashes(source)
    again = build(source, tmp_path / "again")
    for name in ("target.plan", "draft.plan"):
        assert contents(again / name) == contents(plans / name)
    assert {path.name for path in again.iterdir()} == {path.name for path in plans.iterdir()}
    assert hashes(source) == before
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_a_plan_is_for_the_compute_capabilities_that_are_named(source: Path, plans: Path, tmp_path: Path) -> None:
    ada = [build(source, tmp_path / name, ADA) / "target.plan" for name in ("one", "two")]
    assert contents(ada[0]) == contents(ada[1])
    spec = read_manifest(ada[0].parent).target
    assert spec.plan is not None
    assert spec.plan.compute_capabilities == ("8.9",)
    version = bytes(int(part) for part in trt.__version__.split("."))
    assert header(ada[0]) == (b"vtrt", version, 1 << 3)
    assert header(plans / "target.plan") == (b"vtrt", version, 0x7E)


def test_calls_of_width_one_come_last_and_only_to_the_target(source: Path, plans: Path, tmp_path: Path) -> None:
    decode = build(source, tmp_path / "out", with_decode=True)
    manifest = read_manifest(decode)
    kinds = {name: [shape.name for shape in spec.plan.shapes] for name, spec in manifest.engines.items() if spec.plan}
    assert kinds == {"target": ["prefill", *["verify"] * 5, "decode"], "draft": ["prefill", *["verify"] * 5]}
    assert (decode / "target.plan").stat().st_size > (plans / "target.plan").stat().st_size
    assert contents(decode / "draft.plan") == contents(plans / "draft.plan")


def test_attention_in_fp32_is_decomposed(
    tensorrt_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tensorrt_artifact, tmp_path / "out")
    monkeypatch.setattr(Builder, "_decompose_attention", lambda *_: None)
    with pytest.raises(PlanError, match="not supported by a dedicated kernel") as caught:
        build(tensorrt_artifact, tmp_path / "without")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing half-written stays"


@pytest.mark.parametrize(("family", "precision"), [("gemma2", "bf16"), ("qwen2", "int8")])
def test_other_precisions_are_built(tmp_path: Path, family: str, precision: str) -> None:
    profile = tiny.profile(dialect="tensorrt", precision=precision)
    artifact = tiny.export_tiny(tiny.make_model(family, tmp_path / "source"), tmp_path / "artifact", profile=profile)
    spec = read_manifest(build(artifact, tmp_path / "out")).target
    assert spec.plan is not None
    assert spec.precision == precision


def change_graph(folder: Path, change: Callable[[onnx.GraphProto], None]) -> None:
    """Edit the target's graph of a copy, and let the manifest's hashes agree."""
    model = onnx.load(folder / "target.onnx", load_external_data=False)
    change(model.graph)
    onnx.save(model, folder / "target.onnx")
    refresh(folder)


def cross_the_caches(graph: onnx.GraphProto) -> None:
    """Let the key's update be the value's output, and the other way round: same names, types and shapes."""
    names = {"present_key.0": "present_value.0", "present_value.0": "present_key.0"}
    for node in graph.node:
        for place, name in enumerate(node.output):
            node.output[place] = names.get(name, name)
        if node.op_type != "TensorScatter":
            for place, name in enumerate(node.input):
                node.input[place] = names.get(name, name)


def one_more_input(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("extra", TensorProto.FLOAT, [1]))


def an_operator_it_lacks(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.op_type == "Attention")
    node.attribute.append(helper.make_attribute("softcap", 2.0))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (cross_the_caches, "expected present_key.0 to update past_key.0 in place, it does not"),
        (one_more_input, "expected 8 inputs, as in the manifest, found 9"),
        (an_operator_it_lacks, "does not take it: .*softcap"),
    ],
)
def test_a_graph_that_the_builder_would_misread_is_refused(
    source: Path, tmp_path: Path, change: Callable[[onnx.GraphProto], None], text: str
) -> None:
    artifact = copy_artifact(source, tmp_path / "artifact")
    change_graph(artifact, change)
    with pytest.raises(PlanError, match=text) as caught:
        build(artifact, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert "target.onnx" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


def test_an_input_that_the_builder_would_ignore_is_refused(source: Path, tmp_path: Path) -> None:
    """A number of valid keys, which the parser takes without a word; ONNX Runtime would compute something else."""

    def with_lengths(graph: onnx.GraphProto) -> None:
        graph.input.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, [1]))
        node = next(node for node in graph.node if node.op_type == "Attention")
        node.input.extend([""] * (6 - len(node.input)) + ["lengths"])

    artifact = copy_artifact(source, tmp_path / "artifact")
    change_graph(artifact, with_lengths)
    lengths = {"name": "lengths", "dtype": "int64", "shape": [1]}
    edit_manifest(artifact, lambda data: data["engines"]["target"]["inputs"].append(lengths))
    with pytest.raises(PlanError, match=r"would ignore an input: .*Unused Input: lengths"):
        build(artifact, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [("name", "positions", "'positions', 'int64'"), ("dtype", "int32", "'position_ids', 'int32'")],
)
def test_a_manifest_that_says_otherwise_is_refused(
    source: Path, tmp_path: Path, key: str, value: str, text: str
) -> None:
    def change(data: dict[str, Any]) -> None:
        data["engines"]["target"]["inputs"][1][key] = value

    artifact = copy_artifact(source, tmp_path / "artifact", change)
    found = r"as in the manifest, found \('position_ids', 'int64'"
    with pytest.raises(PlanError, match=rf"input: expected \({text}.*{found}"):
        build(artifact, tmp_path / "out")


def test_only_graphs_of_the_dialect_are_built(tiny_artifact: Path, plans: Path, source: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="expected graphs of the tensorrt dialect, found ort: export the model"):
        build(tiny_artifact, tmp_path / "out")
    with pytest.raises(PlanError, match="its target is a plan already: give the artifact that it was built from"):
        build(plans, tmp_path / "out")
    with pytest.raises(ExportError, match="exists: choose another folder, or replace it with --overwrite"):
        build(source, plans)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused_before_anything_is_built(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(entry.size for name, entry in read_manifest(source).files.items() if ".onnx" in name)
    free = SimpleNamespace(free=2 * size - 1)
    monkeypatch.setattr("specrt_export.staging.shutil.disk_usage", lambda _: free)
    with pytest.raises(ExportError, match=r"needed for the artifact, .* free: free some space"):
        build(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    free.free += 1
    build(source, tmp_path / "out")


def test_a_damaged_artifact_is_refused(source: Path, tmp_path: Path) -> None:
    artifact = copy_artifact(source, tmp_path / "artifact")
    data = bytearray((artifact / "target.onnx.data").read_bytes())
    data[0] ^= 1
    (artifact / "target.onnx.data").write_bytes(data)
    with pytest.raises(ManifestError, match=r"target\.onnx\.data: expected SHA-256"):
        build(artifact, tmp_path / "out")


@pytest.mark.parametrize("capability", ["8.7", "9.0", "ada", "89"])
def test_an_unknown_compute_capability_is_refused_with_the_known_ones(capability: str) -> None:
    with pytest.raises(PlanError, match=rf"expected 7\.5, 8\.0, 8\.6, 8\.9, 12\.0, 12\.1, found {capability}"):
        Builder(BuildOptions(builder="tensorrt-rtx", compute_capabilities=(capability,)))


def without_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the other package be this one, with a factory that gives nothing, as TensorRT's without a driver does."""

    def factory(_: object) -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    names = {name: getattr(trt, name) for name in ("ILogger", "__version__")}
    monkeypatch.setattr(builder, "_package", lambda _: SimpleNamespace(**names, Builder=factory))


def test_tensorrt_without_a_driver_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    without_driver(monkeypatch)
    with pytest.raises(PlanError, match=r"^tensorrt cannot start here \(pybind11.*needs an NVIDIA driver and a GPU"):
        Builder(BuildOptions(builder="tensorrt"))
    with pytest.raises(PlanError, match="--compute-capability needs --builder tensorrt-rtx"):
        Builder(BuildOptions(builder="tensorrt", compute_capabilities=("8.9",)))


def test_a_package_that_is_missing_comes_with_the_line_that_installs_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrt_profiles.extras.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"tensorrt not installed: run  pip install 'specrt\[tensorrt\]'"):
        build(source, tmp_path / "out", BuildOptions(builder="tensorrt"))


def build_once(source: Path, **options: Any) -> Any:
    """Build the target's narrowest call alone."""
    spec = read_manifest(source).target
    shapes = (PlanShape(name="verify", width=2, rows=2),)
    return Builder(BuildOptions(**options)).build(spec, source / spec.file, shapes, lambda _: None)


@pytest.mark.filterwarnings("ignore:Timing cache operations are no-ops:DeprecationWarning")
def test_a_timing_cache_is_written_and_read_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By TensorRT-RTX under the other package's name; it keeps nothing in its cache."""
    monkeypatch.setattr(builder, "_package", lambda _: trt)
    cache = tmp_path / "times"
    build_once(source, builder="tensorrt", timing_cache=cache)
    first = cache.read_bytes()
    build_once(source, builder="tensorrt", timing_cache=cache)
    assert cache.read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["times"]


@pytest.mark.filterwarnings("ignore:Timing cache operations are no-ops:DeprecationWarning")
@pytest.mark.parametrize(
    ("place", "text"), [(".", "cannot be read: Is a dir"), ("no/times", "cannot be written: No such")]
)
def test_a_timing_cache_that_cannot_be_kept_is_one_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, text: str
) -> None:
    monkeypatch.setattr(builder, "_package", lambda _: trt)
    with pytest.raises(PlanError, match=rf"the timing cache {text}") as caught:
        build_once(source, builder="tensorrt", timing_cache=tmp_path / place)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_shape_that_the_graph_does_not_have_is_refused(source: Path) -> None:
    spec = read_manifest(source).target
    shapes = (PlanShape(name="verify", width=spec.slots + 2, rows=2),)
    with pytest.raises(PlanError, match=r"target\.onnx: tensorrt-rtx .*KVCacheUpdate.*must be less than") as caught:
        Builder(RTX).build(spec, source / spec.file, shapes, lambda _: None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_what_is_asked_of_the_builder(
    source: Path, tensorrt_artifact: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Every attention is the fused operator, but at fp32, and scratch memory is limited."""
    seen: list[tuple[list[bool], int]] = []
    original = Builder._config

    def spy(self: Builder, network: Any, shapes: Any) -> Any:
        config = original(self, network, shapes)
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        attentions = [layer for layer in layers if layer.type == trt.LayerType.ATTENTION_OUTPUT]
        for layer in attentions:
            layer.__class__ = trt.IAttentionOutputLayer
        limit = config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)
        seen.append(([layer.attention.decomposable for layer in attentions], limit))
        return config

    monkeypatch.setattr(Builder, "_config", spy)
    build_once(source if precision == "fp16" else tensorrt_artifact, builder="tensorrt-rtx", workspace_mib=64)
    assert seen == [([precision == "fp32"] * 2, 64 << 20)], "as many as layers"


def test_a_second_builder_that_would_not_hear_its_warnings_is_refused() -> None:
    first = Builder(RTX)
    with pytest.raises(PlanError, match="something else in this process uses it: build in a process of its own"):
        Builder(RTX)
    assert first.version


def test_what_fails_while_progress_is_shown_stops_the_build(source: Path) -> None:
    told: list[float] = []

    def fail(share: float) -> None:
        told.append(share)
        if share > 0.3:
            raise BrokenPipeError

    spec = read_manifest(source).target
    with pytest.raises(BrokenPipeError):
        Builder(RTX).build(spec, source / spec.file, call_shapes(16, (2, 4), with_decode=False), fail)
    assert 0 < told[0] <= told[-1] < 1, "not called again"


def test_termination_leaves_nothing(source: Path, tmp_path: Path) -> None:
    code = "from specrt_export.cli import plan_command; plan_command()"
    command = [sys.executable, "-c", code, str(source), "-o", str(tmp_path / "out"), "--with-decode"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not list(tmp_path.glob(".out.*/tokenizer.json")) and process.poll() is None:
            time.sleep(0.01)
        process.terminate()
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, stdout) == (143, b"")
    assert b"Exception" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_the_share_that_is_done_rises(source: Path) -> None:
    told: list[float] = []
    spec = read_manifest(source).target
    Builder(RTX).build(spec, source / spec.file, call_shapes(16, (2, 4), with_decode=False), told.append)
    assert told == sorted(told)
    assert len(set(told)) > 20
    assert told[-1] > 0.8


def test_the_command_prints_the_folder(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(main, ["plan", str(source), "-o", str(out), "--workspace", "64"])
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    assert "target: build the plan" in result.stderr
    assert read_manifest(out).target.plan is not None
    result = CliRunner().invoke(main, ["plan", str(source), "-o", str(out)], catch_exceptions=False)
    assert result.exit_code == 1
    assert result.stderr == f"error: {out} exists: choose another folder, or replace it with --overwrite\n"


def test_a_plan_goes_beside_its_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_out(Path("some/artifact")) == Path("some/artifact-plan")
    assert default_out(Path("some/artifact/")) == Path("some/artifact-plan")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert default_out(Path()) == tmp_path / "here-plan"


@pytest.mark.slow
def test_a_plan_of_the_default_model_holds_the_weights_once(real_folder: Path, tmp_path: Path) -> None:
    profile = {"dialect": "tensorrt", "precision": "fp16", "capacity": 512}
    artifact = exported(real_folder, "smollm2-tensorrt-fp16", "smollm2-135m", **profile)
    plan = build(artifact, tmp_path / "out") / "target.plan"
    weight_bytes = read_manifest(plan.parent).target.weight_bytes
    assert weight_bytes < plan.stat().st_size < 1.5 * weight_bytes, "one copy of the weights"


def test_phases_add_up_and_never_fall() -> None:
    phases = Phases()
    phases.start("all", None, 4)
    assert phases.step("all", 0) == 0.25
    phases.start("inner", "all", 2)
    assert phases.step("inner", 0) == 0.375
    phases.start("innermost", "inner", 5)
    assert phases.step("innermost", 4) == 0.5
    phases.finish("innermost")
    phases.start("again", "inner", 5)
    assert phases.step("again", 0) == 0.5, "as much as there was"
    phases.finish("inner")
    assert phases.step("all", 3) == 1.0
