"""Small trainings of heads."""

import io
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specrt_export.distill.call import DistillRequest
from specrt_export.distill.run import distill
from specrt_export.distill.train import TrainingPlan
from specrt_export.distill.writer import BatchSize
from specrt_export.progress import Progress

TEXTS = ("the quick brown fox", "def mean(values)", "你好", "over the lazy dog")


def distill_request(source: Path, folder: Path, **changes: Any) -> DistillRequest:
    """Return a request to train an `eagle` head for a model into a folder, on answers to `TEXTS`."""
    prompts = source / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in TEXTS), "utf-8")
    settings: dict[str, Any] = {
        "model": str(source), "layout": "eagle", "out": folder / "head.safetensors", "work": folder / "work",
        "tokens": 3000, "cache_dir": folder, "vocabulary_size": 200, "size": BatchSize(rows=8, length=192),
        "training": TrainingPlan(epochs=6, batch=512, learning_rate=3e-3, warmup=4), "prompts": prompts,
    }  # fmt: skip
    return DistillRequest(**{**settings, **changes})


def trained_head(source: Path, folder: Path, **changes: Any) -> Path:
    """Train a head silently; the number of threads is what it was before."""
    threads = torch.get_num_threads()
    try:
        head = distill(distill_request(source, folder, **changes), Progress(stream=io.StringIO()))
    finally:
        torch.set_num_threads(threads)
    assert head is not None
    return head


def card_of(head: Path) -> dict[str, Any]:
    """Return the card beside a head."""
    found: dict[str, Any] = json.loads(head.with_suffix(".json").read_text("utf-8"))
    return found


def run(wanted: DistillRequest, **clock: Any) -> tuple[Path | None, str]:
    """Train; return the head, None where the minutes ended before there was one, and what was said."""
    stream = io.StringIO()
    return distill(wanted, Progress(stream=stream), **clock), stream.getvalue()


def assert_resumes(wanted: DistillRequest, trained: Path) -> Path:
    """Train on a finished training's text with a clock that interrupts; assert that it ends at the same head."""
    shutil.copytree(trained / "work" / "texts", wanted.work / "texts")
    shutil.copy(trained / "work" / "about.json", wanted.work)
    states: list[int | None] = []
    while not states or states[-1] != card_of(trained / "head.safetensors")["updates"]:
        ticks = itertools.count()
        written, _ = run(wanted, clock=lambda ticks=ticks: 1.5 * next(ticks))
        states.append(None if written is None else card_of(written)["updates"])
        assert len(states) < 12
    assert len(states) > 2
    assert written is not None
    for name, tensor in load_file(trained / "head.safetensors").items():
        assert tensor.equal(load_file(written)[name]), name
    return written
