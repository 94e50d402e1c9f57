"""Techniques alone and together: one line per artifact, with speed, memory and quality (docs/techniques.md).

python -m benchmarks.techniques artifacts/smollm2-fp32 artifacts/smollm2-int8 artifacts/smollm2-int4

Each artifact runs in a process of its own, in rounds over all of them, so that a machine that drifts slows all alike.
Memory is what the process holds after its first answer, libraries and tokenizer included.
"""

import json
import resource
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click

from specrt.bench import PLAIN, PLAIN_ONE, run_bench
from specrt.errors import SpecRTError
from specrt.inspect import kv_bytes
from specrt.language_model import load
from specrt.machine import processor
from specrt.prompts import load_prompts
from specrt_profiles.manifest import read_manifest

_MIB = 1 << 20
_STATM = Path("/proc/self/statm")  # of the operating system: pages that this process holds
_HEADER = (
    "| artifact | weights read per call | KV buffers | memory | plain-1 | plain | speculation | spread | mean KL | "
    "perplexity |\n|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Round:
    """One artifact in one round: tokens/s by setting over all prompts, the largest spread of these, MiB of memory."""

    tokens_per_s: dict[str, float]
    mib: float


@click.command()
@click.argument("artifacts", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--drafter", help="Measure this one.  [default: each artifact's own]")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON lines.  [default: the built-in ones]")
@click.option("--limit", default=1, show_default=True, type=click.IntRange(1), help="Prompts per category.")
@click.option("--max-tokens", default=96, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--threads", type=click.IntRange(1), help="CPU threads; one per physical core if left out.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write what was measured to this file too.")
def main(
    artifacts: tuple[Path, ...], drafter: str | None, prompts: Path | None, limit: int, max_tokens: int, rounds: int,
    threads: int | None, path: Path | None,
) -> None:  # fmt: skip
    """Measure greedy decoding of artifacts, plain and speculative."""
    measured: dict[Path, list[Round]] = {artifact: [] for artifact in artifacts}
    if not _STATM.is_file():
        raise click.ClickException(f"expected {_STATM}, which tells a process's memory, found none: run it on Linux")
    try:
        for _ in range(rounds):
            for artifact, found in measured.items():
                found.append(_apart(measure, artifact, drafter, prompts, limit, max_tokens, threads))
    except SpecRTError as error:
        raise click.ClickException(str(error)) from None
    click.echo(
        f"{processor()}; {prompts or 'built-in prompts'}, {limit} per category, {max_tokens} tokens, greedy\n\n"
        f"{_HEADER}"
    )
    for artifact, found in measured.items():
        click.echo(line(artifact, found))
    if path is not None:
        rows = {artifact.name: [asdict(entry) for entry in found] for artifact, found in measured.items()}
        path.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def measure(
    artifact: Path, drafter: str | None, path: Path | None, limit: int, max_tokens: int, threads: int | None
) -> Round:  # fmt: skip
    """Run an artifact's prompts once; only what this process holds is counted."""
    with load(artifact, threads=threads) as model:
        prompts = load_prompts(path, limit=limit)
        options: Any = {"max_tokens": max_tokens, "temperature": 0.0}
        named = {} if drafter is None else {"drafter": drafter}
        used = model.generate(prompts[0].text, **options, **named).stats.drafter
        resident_pages = int(_STATM.read_text("ascii").split()[1])
        mib = resident_pages * resource.getpagesize() / _MIB
        rows = run_bench(
            model, prompts, drafters=[used], ks=["auto"], repeats=1, options=options, chat=True, on_run=lambda: None
        )
    return Round({row.drafter or row.setting: row.tokens_per_s for row in rows if row.category == "all"}, mib)


def line(artifact: Path, found: Sequence[Round]) -> str:
    """Return an artifact's line: medians over the rounds, and the largest spread of a setting."""
    spec = read_manifest(artifact).target
    settings = list(found[0].tokens_per_s)
    speeds = {name: [entry.tokens_per_s[name] for entry in found] for name in settings}
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    spread = max((max(values) - min(values)) / medians[name] for name, values in speeds.items())
    (used,) = set(settings) - {PLAIN, PLAIN_ONE}
    mib = statistics.median(entry.mib for entry in found)
    return (
        f"| {artifact.name} | {spec.weight_bytes / _MIB:.0f} MiB | {kv_bytes(spec) / _MIB:.0f} MiB | {mib:.0f} MiB | "
        f"{medians[PLAIN_ONE]:.0f} | {medians[PLAIN]:.0f} | {used} {medians[used]:.0f} "
        f"({medians[used] / medians[PLAIN_ONE]:.2f} x) | {spread:.0%} | {spec.parity.mean_kl:.2g} | "
        f"{spec.parity.perplexity:.2f} |"
    )


def _apart(run: Callable[..., Round], *arguments: Any) -> Round:
    """Run a function in a process of its own, which takes its memory with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run, *arguments).result()


if __name__ == "__main__":
    main()
