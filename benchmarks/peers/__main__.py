"""`make bench-peers`: SpecRT and other libraries side by side, on the same prompts, token ids and threads."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from benchmarks.peers import tables
from benchmarks.peers.driver import Choice, Measured, PeersError, measure
from benchmarks.peers.protocol import DRAFT, NGRAM, PLAIN
from benchmarks.peers.registry import PEERS
from benchmarks.peers.results import Lane, Run, Setting, setting_rows, to_json
from specrt.machine import processor
from specrt.prompts import load_prompts
from specrt_profiles.errors import SpecRTError

_REFERENCES = (Lane("hf", "fp32"), Lane("specrt", "fp32"))  # whose plain tokens are right: the first that ran


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="Built-in name, directory or GGUF file.")
@click.option("--draft", help="Draft model of the same vocabulary, for the draft settings of every peer.")
@click.option("--only", multiple=True, metavar="PEER[:WEIGHTS]", help="Measure only these; may be repeated.")
@click.option("--artifact", multiple=True, metavar="WEIGHTS=DIR", help="A ready SpecRT artifact (int8=DIR).")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON lines as for 'specrt bench'.")
@click.option("--per-category", default=1, show_default=True, help="Prompts of each category.")
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(32), help="New tokens per run.")
@click.option("--ks", default="3,5,9", show_default=True, help="Most tokens per proposal, comma-separated.")
@click.option("--repeats", default=2, show_default=True, type=click.IntRange(1))
@click.option("--threads", type=click.IntRange(1), help="Of every peer; all processors if left out.")
@click.option("--capacity", default=2048, show_default=True, help="Longest prompt and output together.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("artifacts/peers"), show_default=True)
@click.option("--envs", type=click.Path(path_type=Path), default=Path(".venv-peers"), show_default=True)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Where results go; WORK/results.json if left out.")
def main(out: Path | None, **options: Any) -> None:
    """Measure SpecRT and its peers; print tables, write a JSON file."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        choice = _choice(**options)
        measured = measure(choice, lambda text: click.echo(text, err=True), _counter())
        report = _report(choice, measured)
    except (PeersError, SpecRTError) as error:
        raise click.ClickException(str(error)) from None
    out = out or choice.work / "results.json"
    out.write_text(json.dumps(report, indent=1))
    click.echo(f"everything measured: {out}")


def _choice(
    *, only: Sequence[str], artifact: Sequence[str], prompts: Path | None, per_category: int, max_tokens: int, ks: str,
    threads: int | None, model: str, draft: str | None, work: Path, envs: Path, **options: Any,
) -> Choice:  # fmt: skip
    try:
        widths = sorted({int(k) for k in ks.split(",")})
        artifacts = {name: Path(folder) for name, folder in (text.split("=", 1) for text in artifact)}
    except ValueError:
        raise click.UsageError("expected --ks as numbers (3,5,9) and --artifact as WEIGHTS=DIR") from None
    if min(widths) < 1 or not set(artifacts) <= set(PEERS["specrt"].variants):
        raise click.UsageError(f"expected --ks from 1 and --artifact of {', '.join(PEERS['specrt'].variants)}")
    modes = (NGRAM, DRAFT) if draft else (NGRAM,)
    return Choice(
        model=_found(model), draft=draft and _found(draft), work=work.absolute(), envs=envs.absolute(),
        lanes=_lanes(only), artifacts=artifacts, num_tokens=max_tokens,
        prompts=load_prompts(prompts, limit=per_category), threads=threads or _processors(),
        settings=[Setting(PLAIN, 0), *(Setting(mode, k) for mode in modes for k in widths)], **options,
    )  # fmt: skip


def _found(model: str) -> str:
    """Return a name as it is and a path as an absolute one: other processes run elsewhere."""
    return str(Path(model).absolute()) if Path(model).exists() else model


def _lanes(only: Sequence[str]) -> list[Lane]:
    lanes = [Lane(entry.name, variant) for entry in PEERS.values() for variant in entry.variants]
    known = {f"{lane.peer}:{lane.variant}" for lane in lanes} | set(PEERS)
    if unknown := [name for name in only if name not in known]:
        raise click.UsageError(f"--only {unknown[0]}: expected one of {', '.join(sorted(known))}")
    return [lane for lane in lanes if not only or {lane.peer, f"{lane.peer}:{lane.variant}"} & set(only)]


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _counter() -> Any:
    done = 0

    def on_run(total: int) -> None:
        nonlocal done
        done += 1
        if done % 20 == 0 or done == total:
            click.echo(f"{done} of {total} runs", err=True)

    return on_run


def _report(choice: Choice, measured: Measured) -> dict[str, Any]:
    """Print the tables and return what the JSON file holds."""
    runs = measured.runs
    if not runs:
        raise PeersError(f"nothing could be measured: {'; '.join(tables.notes(measured.facts)) or 'no lanes'}")
    source, reference = _reference(runs)
    rows = setting_rows(runs, reference)
    idle = [run.idle_s for run in runs if run.idle_s is not None]
    total = sum(run.decode_s + run.prompt_s for run in runs)
    click.echo(f"{tables.summary_table(rows, measured.facts)}\n\n{tables.setting_table(rows)}\n")
    click.echo(f"plain / best speculative, tokens/s:\n\n{tables.category_table(rows, measured.facts)}\n")
    click.echo("\n".join([*tables.notes(measured.facts), f"equal tokens: to {source}"]))
    if idle:
        click.echo(f"waiting workers used {sum(idle):.2f} s of processor time during {total:.0f} s of runs")
    return {
        "command": sys.argv[1:], "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "processor": processor(), "threads": choice.threads},
        "versions": {
            "specrt": [f"{name}=={metadata.version(name)}" for name in ("specrt", "onnxruntime", "numpy")],
            **{peer: PEERS[peer].requirements for peer in {lane.peer for lane in choice.lanes} - {"specrt"}},
        },
        "model": choice.model, "draft": choice.draft, "num_tokens": choice.num_tokens, "repeats": choice.repeats,
        "num_prompts": measured.num_prompts, "reference": source, "idle_s": sum(idle) if idle else None,
        **to_json(rows, measured.facts, runs),
    }  # fmt: skip


def _reference(runs: Sequence[Run]) -> tuple[str, dict[int, tuple[int, ...]]]:
    """Return whose plain tokens the others are compared with, and these tokens by prompt."""
    plain = [run for run in runs if run.setting.mode == PLAIN]
    if not plain:
        raise PeersError("no plain decoding could be measured")
    ran = {run.lane for run in plain}
    lane = next((lane for lane in _REFERENCES if lane in ran), plain[0].lane)
    return f"{lane} plain", {run.prompt: run.ids for run in reversed(plain) if run.lane == lane}


if __name__ == "__main__":
    main()
