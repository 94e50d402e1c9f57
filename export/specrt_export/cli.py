"""`specrt export`, `specrt plan` and `specrt models`. The heavy libraries are imported when an export begins."""

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

import click

from specrt_profiles.extras import require
from specrt_profiles.plan import BuilderName
from specrt_profiles.profile import PRECISIONS, builtin_profiles, load_profile

_EXTRA = ("torch", "transformers", "optimum", "onnx", "onnxscript", "onnxruntime", "gguf", "safetensors")


def default_cache_dir() -> Path:
    """Return the folder where fetched models are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specrt" / "models"


@click.command(name="export", epilog="""\b
Examples:
  specrt export smollm2-135m -o artifacts/smollm2
  specrt export qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b --precision int4 -o artifacts/qwen
  specrt export smollm2-135m --head heads/smollm2.safetensors -o artifacts/smollm2-eagle
  specrt export smollm2-135m --head none --early-exit auto -o artifacts/smollm2-exit
  specrt export --add-to artifacts/smollm2 --draft ./my-draft -o artifacts/smollm2-drafted""")  # fmt: skip
@click.argument("model", required=False)
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option(
    "--draft",
    metavar="MODEL|ngram|suffix|none",
    help="The artifact's default drafter.  [default: combined with a head, else ngram]",
)
@click.option(
    "--head",
    "heads",
    metavar="FILE|none",
    multiple=True,
    help="Head or exit for MODEL, see 'distill'; repeatable.  [default: a built-in MODEL's own, without --draft]",
)
@click.option(
    "--early-exit", metavar="LAYERS|auto", help="Let MODEL's first layers guess; auto: as many as promise most."
)
@click.option(
    "--profile", metavar="NAME|FILE", help=f"Built-in ({', '.join(builtin_profiles())}) or TOML.  [default: cpu]"
)
@click.option("--precision", type=click.Choice(PRECISIONS), help="Weights of the target.  [default: the profile's]")
@click.option(
    "--draft-precision",
    type=click.Choice(PRECISIONS),
    help="Weights of a draft model or head.  [default: the profile's]",
)
@click.option(
    "--kv-precision", type=click.Choice(["same", "fp32", "int8"]), help="Keys and values.  [default: the profile's]"
)
@click.option(
    "--dialect", type=click.Choice(["ort", "tensorrt"]), help="Operators of the graphs.  [default: the profile's]"
)
@click.option("--trees", is_flag=True, default=None, help="Let the target verify trees of proposals.")
@click.option(
    "--output",
    type=click.Choice(["logits", "argmax", "top-k"]),
    help="argmax, top-k: graphs that also say each row's best token, or 64, for GPUs.  [default: the profile's]",
)
@click.option("--capacity", type=int, help="Longest sequence in tokens.  [default: the profile's]")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option(
    "--add-to",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Copy this artifact and give the copy the --draft.",
)
@click.option(
    "--cache-dir", type=click.Path(path_type=Path), default=default_cache_dir, help="Where built-in models are kept."
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
def export_command(
    model: str | None, out: Path, draft: str | None, heads: tuple[str, ...], early_exit: str | None,
    profile: str | None, precision: str | None,
    draft_precision: str | None, kv_precision: str | None, dialect: str | None, trees: bool | None, output: str | None,
    capacity: int | None, revision: str | None, add_to: Path | None, cache_dir: Path, overwrite: bool,
) -> None:  # fmt: skip
    """Turn MODEL into an artifact.

    MODEL is a built-in name (see 'specrt models'), a hub id, a transformers directory with safetensors, or a GGUF
    file. Prints the folder written to standard output; progress goes to standard error.
    """
    begin()
    from specrt_export.artifact import NO_ENGINE, ExportRequest, export
    from specrt_export.catalogue import own_head
    from specrt_export.progress import Progress

    if add_to is not None:
        fixed: dict[str, object] = {
            "--profile": profile, "--precision": precision, "--kv-precision": kv_precision, "--dialect": dialect,
            "--trees": trees, "--output": output, "--capacity": capacity, "--revision": revision,
            "--head": heads or None, "--early-exit": early_exit,
        }  # fmt: skip
        if given := [name for name, value in fixed.items() if value is not None]:
            raise click.UsageError(f"{given[0]} has no effect with --add-to: the target there stays as it is")
        if draft is None:
            raise click.UsageError("--add-to needs a --draft: a model, ngram, suffix or none")
    chosen = load_profile(
        profile or "cpu", precision=precision, draft_precision=draft_precision, kv_precision=kv_precision,
        dialect=dialect, trees=trees, output=output, capacity=capacity,
    )  # fmt: skip
    paths = tuple(Path(head) for head in heads if head != "none")
    if not heads and draft is None and chosen.dialect == "ort" and (own := own_head(model)) is not None:
        paths = (own,)
    if draft_precision is not None and not paths and draft in (None, *NO_ENGINE):
        raise click.UsageError("--draft-precision needs a draft model or head: --draft MODEL or --head FILE")
    request = ExportRequest(
        model=model, draft=draft, profile=chosen, out=out, cache_dir=cache_dir, revision=revision, add_to=add_to,
        overwrite=overwrite, heads=paths, early_exit=_exit_layer(early_exit),
    )  # fmt: skip
    click.echo(export(request, Progress()))


@click.command(name="plan", epilog="""\b
Examples:
  specrt export smollm2-135m --dialect tensorrt --precision fp16 -o artifacts/smollm2-trt
  specrt plan artifacts/smollm2-trt
  specrt plan artifacts/smollm2-trt --compute-capability 8.9 -o artifacts/smollm2-ada""")  # fmt: skip
@click.argument("artifact", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder to write.  [default: ARTIFACT-plan]")
@click.option(
    "--builder",
    type=click.Choice(["tensorrt", "tensorrt-rtx"]),
    default="tensorrt-rtx",
    show_default=True,
    help="tensorrt builds for the GPU of this machine, tensorrt-rtx needs none.",
)
@click.option(
    "--compute-capability",
    "capabilities",
    metavar="X.Y",
    multiple=True,
    help="Build for these GPUs only (tensorrt-rtx; may be repeated).  [default: 8.0 and later]",
)
@click.option("--workspace", type=click.IntRange(min=1), metavar="MIB", help="Most scratch memory of a call.")
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep the builder's measurements there (tensorrt).",
)
@click.option("--with-decode", is_flag=True, help="Also build calls of width 1, which store the weights a second time.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
def plan_command(
    artifact: Path,
    out: Path | None,
    builder: BuilderName,
    capabilities: tuple[str, ...],
    workspace: int | None,
    timing_cache: Path | None,
    with_decode: bool,
    overwrite: bool,
) -> None:
    """Build TensorRT plans of ARTIFACT, exported with --dialect tensorrt, into a folder of their own.

    Prints the folder written to standard output; progress goes to standard error.
    """
    _unwind_on_signals()
    from specrt_export.builder import BuildOptions
    from specrt_export.plan import PlanRequest, build_plan, default_out
    from specrt_export.progress import Progress

    options = BuildOptions(
        builder=builder, compute_capabilities=tuple(sorted(set(capabilities), key=_by_number)),
        workspace_mib=workspace, timing_cache=timing_cache,
    )  # fmt: skip
    request = PlanRequest(
        artifact=artifact, out=out or default_out(artifact), options=options, with_decode=with_decode,
        overwrite=overwrite,
    )  # fmt: skip
    click.echo(build_plan(request, Progress()))


@click.command(name="models", epilog="""\b
Examples:
  specrt models
  specrt models --json""")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--cache-dir", type=click.Path(path_type=Path), default=default_cache_dir, help="Where built-in models are kept."
)
def models_command(as_json: bool, cache_dir: Path) -> None:
    """List the models that 'specrt export' knows by name."""
    from specrt_export.catalogue import catalogue

    rows = [
        {
            "name": name,
            "megabytes": round(entry.size / 1e6),
            "cached": entry.path(cache_dir).is_file(),
            "description": entry.description,
        }
        for name, entry in catalogue().items()
    ]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        here = "cached" if row["cached"] else "to fetch"
        click.echo(f"{row['name']:<20} {row['megabytes']:>5} MB  {here:<8}  {row['description']}")


def _exit_layer(asked: str | None) -> int | Literal["auto"] | None:
    if asked is None or asked == "auto":
        return "auto" if asked else None
    if not asked.isdigit():
        raise click.UsageError(f"--early-exit: expected auto or a number of layers, found {asked!r}")
    return int(asked)


def _by_number(capability: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in capability.split("."))


def _unwind_on_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGTERM,):
        signal.signal(number, _interrupt)


def begin() -> None:
    """Check that the libraries of the export are there, silence them, and let signals unwind."""
    require("export", *_EXTRA)
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' own bars; ours says what they would
    _unwind_on_signals()
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)  # unwinds, so that the half-written folder is removed
