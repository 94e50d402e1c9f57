"""Plans: an artifact of the TensorRT dialect into another one that holds a plan in the place of each graph.

An artifact is never written to, so the plans get a folder of their own, with everything that goes with them: tokenizer,
reference logits, and a manifest that says what the plans were built for.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from specrt_export.builder import Builder, BuildOptions, PlanError
from specrt_export.estimate import show_bytes
from specrt_export.progress import Progress
from specrt_export.staging import check_disk, check_output, link_files, list_files, staging
from specrt_profiles.files import FileEntry, check_hashes, sha256_of
from specrt_profiles.manifest import MANIFEST_FILE, EngineSpec, Manifest, read_manifest, write_manifest
from specrt_profiles.plan import PlanSpec, call_shapes, kv_aliases

_PLAN_SIZE = 2  # times the graph's: 1.2 at fp16, 2.0 with calls of width 1, 1.5 at int8, 1.6 at int4


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Which artifact to build plans of, and where to; `with_decode`: also for target calls of width 1."""

    artifact: Path
    out: Path
    options: BuildOptions
    with_decode: bool = False
    overwrite: bool = False


def build_plan(request: PlanRequest, progress: Progress) -> Path:
    """Write an artifact with plans and return its folder; until it is complete there is only a hidden sibling.

    Raises `PlanError` for an artifact of another dialect and for what the builder refuses, `MissingExtraError` without
    the builder's package.
    """
    manifest = read_manifest(request.artifact)
    _check_engines(manifest, request.artifact)
    check_output(request.out, overwrite=request.overwrite)
    builder = Builder(request.options)
    graphs = {name for spec in manifest.engines.values() for name in (spec.file, spec.weights)}
    check_disk(request.out, _PLAN_SIZE * sum(manifest.files[name].size for name in graphs))
    with progress.step("check the artifact"):
        check_hashes(request.artifact, manifest.files)
    with staging(request.out) as folder:
        kept = {name: entry for name, entry in manifest.files.items() if name not in graphs}
        link_files(kept, request.artifact, folder)
        engines = {
            name: _build_engine(name, spec, request, builder, folder, progress)
            for name, spec in manifest.engines.items()
        }
        write_manifest(folder, _with_plans(manifest, engines, kept, folder, builder, request))
        read_manifest(folder)
    return request.out


def default_out(artifact: Path) -> Path:
    """Return the folder that the plans of an artifact go to unless another one is named: a sibling of it."""
    resolved = artifact.resolve()
    return artifact.parent / f"{artifact.name}-plan" if artifact.name else resolved.with_name(f"{resolved.name}-plan")


def _check_engines(manifest: Manifest, artifact: Path) -> None:
    for name, spec in manifest.engines.items():
        if spec.plan is not None:
            raise PlanError(f"{artifact}: its {name} is a plan already: give the artifact that it was built from")
        if spec.dialect != "tensorrt":
            raise PlanError(
                f"{artifact}: expected graphs of the tensorrt dialect, found {spec.dialect}: export the model with "
                "--dialect tensorrt"
            )


def _build_engine(
    name: str, spec: EngineSpec, request: PlanRequest, builder: Builder, folder: Path, progress: Progress
) -> EngineSpec:
    shapes = call_shapes(spec.prefill_width, spec.verify_widths, with_decode=request.with_decode and name == "target")
    started = time.perf_counter()
    with progress.share(f"{name}: build the plan") as on_fraction:
        plan = builder.build(spec, request.artifact / spec.file, shapes, on_fraction)
    path = folder / f"{name}.plan"
    path.write_bytes(plan)
    took, size = time.perf_counter() - started, show_bytes(path.stat().st_size)
    progress.say(f"    {len(shapes)} call shapes, {size}, {took:.1f} s")
    facts = PlanSpec(
        builder=request.options.builder, version=builder.version,
        compute_capabilities=request.options.compute_capabilities, shapes=shapes, aliases=kv_aliases(spec.inputs),
        output=spec.output, source=sha256_of(request.artifact / MANIFEST_FILE),
    )  # fmt: skip
    return replace(spec, file=path.name, weights=path.name, plan=facts)


def _with_plans(
    manifest: Manifest, engines: Mapping[str, EngineSpec], kept: Mapping[str, FileEntry], folder: Path,
    builder: Builder, request: PlanRequest,
) -> Manifest:  # fmt: skip
    tools = {**manifest.tools, request.options.builder: builder.version}
    return replace(manifest, engines=engines, tools=tools, files=list_files(folder, kept))
