"""`make gpu-check`: run artifacts on a GPU for real, compare with the CPU, and measure calls.

Per artifact: mean KL to its source over the reference rows; tokens on the built-in prompts, greedy ones against the
CPU's, greedy and sampled ones of speculation against plain decoding's, and where logits stay on the GPU against those
that whole rows give; whether a rollback leaves a trace in any call shape; which widths give the same bits; the seconds
of a call by width. Without a GPU it says so, and claims nothing.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrt import LanguageModel, SpecRTError, load
from specrt.check import is_as_exported, mean_kl
from specrt.cuda import probe_driver
from specrt.engine import Engine, measurable_widths
from specrt.errors import MissingExtraError
from specrt.prompts import load_prompts
from specrt_profiles.exactness import find_exact_widths

NO_GPU = 3  # exit code of --probe
_MAX_TOKENS, _REPEATS, _CONTEXT = 64, 50, 256
_KS = {"greedy": (3, 15), "sampled": (3,), "top-p": (3,)}
_SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_k": 20, "seed": 1},  # best tokens say all that the filter leaves
    "top-p": {"temperature": 0.7, "top_p": 0.5, "seed": 1},  # the same, mostly, with the sum over all tokens
}
Clock = Callable[[], float]


def texts(
    model: LanguageModel, prompts: Sequence[str], k: int, sampling: Mapping[str, Any] = _SAMPLING["greedy"]
) -> list[tuple[int, ...]]:
    """Return the tokens that follow each prompt."""
    how: dict[str, Any] = {"k": k, "max_tokens": _MAX_TOKENS, "drafter": "ngram", **sampling}
    chat = model.tokenizer.has_chat_template
    asked = [[{"role": "user", "content": text}] if chat else text for text in prompts]
    return [model.generate(prompt, **how).token_ids for prompt in asked]  # type: ignore[arg-type]


def whole_rows(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same law, by a bias of nothing, for which the host looks at every row of logits."""
    return {**sampling, "logit_bias": {0: 0.0}}


def num_equal(found: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]]) -> int:
    """Return how many of the texts are the same."""
    return sum(a == b for a, b in zip(found, expected, strict=True))


def rollback_traces(engine: Engine, tokens: Sequence[int]) -> list[int]:
    """Return the verify widths whose logits change after rejected tokens were written behind the kept ones."""
    changed = []
    for width in engine.verify_widths:
        engine.rollback(0)
        engine.prefill(tokens[:20])
        clean = np.array(engine.verify(tokens[20 : 20 + width]))
        for rejected in engine.verify_widths:
            engine.rollback(20)
            engine.verify(tokens[40 : 40 + rejected])
        engine.rollback(20)
        if not np.array_equal(np.asarray(engine.verify(tokens[20 : 20 + width])), clean):
            changed.append(width)
    return changed


def call_times(engine: Engine, tokens: Sequence[int], *, repeats: int, clock: Clock) -> dict[str, dict[str, float]]:
    """Return median and spread of the seconds of a call behind 256 tokens, by width; widths take turns.

    spread: (slowest - fastest) / median.
    """
    context = min(_CONTEXT, engine.capacity - engine.verify_widths[-1])
    calls: dict[str, Callable[[], object]] = {"decode": lambda: engine.decode(tokens[context])}
    for width in engine.verify_widths:
        calls[str(width)] = lambda width=width: engine.verify(tokens[context : context + width])  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    engine.rollback(0)
    engine.prefill(tokens[:context])
    for turn in range(repeats + 3):
        for name, call in calls.items():
            engine.rollback(context)
            started = clock()
            call()
            if turn >= 3:  # those before bind, compile and capture
                seconds[name].append(clock() - started)
    return {
        name: {"median_s": (m := statistics.median(times)), "spread": (max(times) - min(times)) / m}
        for name, times in seconds.items()
    }


def check_texts(
    model: LanguageModel, prompts: Sequence[str], expected: Sequence[tuple[int, ...]]
) -> tuple[dict[str, Any], list[str]]:
    """Return how many texts are what they should be, and what is wrong, in words; those of the CPU may differ."""
    found: dict[str, Any] = {"num_texts": len(prompts), "speculative_as_plain": {}, "as_whole_rows": {}}
    problems: list[str] = []
    for name, sampling in _SAMPLING.items():
        plain = texts(model, prompts, 0, sampling)
        if name == "greedy":
            found["as_on_cpu"] = num_equal(plain, expected)
        others = {
            ("speculative_as_plain", f"{name}, k={k}"): texts(model, prompts, k, sampling)
            for k in _KS[name] if k <= model.max_k
        }  # fmt: skip
        if model.manifest.target.output != "logits":
            others["as_whole_rows", name] = texts(model, prompts, 0, whole_rows(sampling))
        for (what, which), other in others.items():
            found[what][which] = count = num_equal(other, plain)
            if count < len(plain):
                problems.append(f"{which}: {count} of {len(plain)} texts {what.replace('_', ' ')}")
    return found, problems


def check_model(
    model: LanguageModel, prompts: Sequence[str], expected: Sequence[tuple[int, ...]], *, repeats: int, clock: Clock
) -> dict[str, Any]:
    """Return the report of one loaded artifact; `problems` says what is wrong, in words."""
    engine, spec = model.target, model.manifest.target
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, engine.capacity).tolist()
    counts, problems = check_texts(model, prompts, expected)
    traces, kl = rollback_traces(engine, tokens), mean_kl(engine, spec, model.folder)
    exact = find_exact_widths(
        engine.forward, measurable_widths(spec), vocab_size=engine.vocab_size, capacity=engine.capacity
    )
    problems += [f"a rollback leaves a trace at width {width}" for width in traces]
    if not is_as_exported(kl, spec.parity.mean_kl):
        problems.append(f"mean KL {kl:.3g}, at export {spec.parity.mean_kl:.3g}")
    return {
        "platform": engine.platform, "dialect": spec.dialect, "precision": spec.precision, "output": spec.output,
        **counts, "mean_kl": kl,
        "ladder": engine.verify_widths, "same_bits": exact.groups, "dependent": exact.dependent,
        "calls": call_times(engine, tokens, repeats=repeats, clock=clock), "problems": problems,
    }  # fmt: skip


def check_folder(
    folder: Path, prompts: Sequence[str], expected: Sequence[tuple[int, ...]], *, device: str,
    cache_dir: Path | None = None, repeats: int = _REPEATS, clock: Clock = time.perf_counter,
) -> dict[str, Any]:  # fmt: skip
    """Return the report of one artifact on `device`; expected: the greedy tokens of each prompt on the CPU."""
    started = clock()
    try:
        with load(folder, device=device, cache_dir=cache_dir) as model:
            report = check_model(model, prompts, expected, repeats=repeats, clock=clock)
    except MissingExtraError as error:
        return {"artifact": str(folder), "not_run": str(error)}
    except SpecRTError as error:
        return {"artifact": str(folder), "problems": [str(error)]}
    return {"artifact": str(folder), **report, "seconds": clock() - started}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the artifacts named on the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=str(__doc__).partition("\n")[0])
    parser.add_argument("reference", nargs="?", type=Path, help="artifact of ONNX graphs whose tokens the CPU gives")
    parser.add_argument("artifacts", nargs="*", type=Path, help="artifacts to run on the GPU")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="file of the report")
    parser.add_argument(
        "--probe", action="store_true", help=f"only say whether there is a GPU (exit code {NO_GPU} if not)"
    )
    given = parser.parse_args(arguments)
    try:
        probe_driver()
    except SpecRTError as error:
        print(f"gpu-check: {error}; nothing was run, and nothing is claimed")
        return NO_GPU if given.probe else 0
    if given.probe:
        print("gpu-check: there is a CUDA driver")
        return 0
    if given.reference is None or not given.artifacts:
        parser.error("expected a reference and the artifacts to run")
    prompts = [prompt.text for prompt in load_prompts(None, limit=1)]
    with load(given.reference, device="cpu") as model:
        expected = texts(model, prompts, 0)
    reports = [check_folder(folder, prompts, expected, device=given.device) for folder in given.artifacts]
    given.out.write_text(json.dumps(reports, indent=1) + "\n", "utf-8")
    print(json.dumps(reports, indent=1))
    return int(any(report.get("problems") for report in reports) or all("not_run" in report for report in reports))


if __name__ == "__main__":
    sys.exit(main())
