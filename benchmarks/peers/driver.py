"""From options to measurements: sources, environments, conversions, then the bench."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.client import Worker, WorkerError
from benchmarks.peers.environments import python_of
from benchmarks.peers.measure import Bench, PromptIds
from benchmarks.peers.protocol import Job, Model
from benchmarks.peers.quality import read_reference
from benchmarks.peers.registry import PEERS, PeerEntry
from benchmarks.peers.results import Lane, LaneFacts, Run, Setting
from specrt.prompts import BenchPrompt
from specrt.text import Tokenizer
from specrt_profiles.manifest import CHAT_TEMPLATE_FILE, Vocabulary

_ROOT = Path(__file__).parents[2]
_TEXTS, _TEXT_LENGTH = 10, 64  # fixed texts for the KL: the first prompts, this many tokens of each
_SPARE = 32  # tokens of context beyond prompt and output, for proposals that are rejected
Say = Callable[[str], None]


class PeersError(Exception):
    """Why nothing can be measured, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is to be measured. work: folder of everything that is prepared; envs: folder of the environments."""

    model: str
    draft: str | None
    lanes: Sequence[Lane]
    artifacts: Mapping[str, Path]
    settings: Sequence[Setting]
    prompts: Sequence[BenchPrompt]
    num_tokens: int
    repeats: int
    threads: int
    capacity: int
    work: Path
    envs: Path


@dataclass(slots=True, kw_only=True)
class Measured:
    """What came out."""

    facts: dict[Lane, LaneFacts]
    runs: list[Run] = field(default_factory=list)
    num_prompts: int = 0


def measure(choice: Choice, say: Say, on_run: Callable[[int], None]) -> Measured:
    """Prepare whatever is missing and run the bench; on_run is called after each run with the number of all runs."""
    target = _source(choice.model, choice.work, say)
    draft = _source(choice.draft, choice.work, say) if choice.draft else None
    prompts = _token_ids(choice, target)
    texts = target / "texts.json"
    texts.write_text(json.dumps([prompt.ids[-_TEXT_LENGTH:] for prompt in prompts[:_TEXTS]]))
    _source(choice.model, choice.work, say, texts)
    context = max(len(prompt.ids) for prompt in prompts) + choice.num_tokens + _SPARE
    measured = Measured(facts={lane: LaneFacts() for lane in choice.lanes}, num_prompts=len(prompts))
    bench = Bench(measured.facts, choice.settings, choice.work / "logs")
    try:
        for lane in choice.lanes:
            entry = PEERS[lane.peer]

            def job(mode: str | None, lane: Lane = lane) -> Job:
                return _job(choice, lane, mode, target, draft, context)

            python = python_of(entry, choice.envs, say)
            problem = python if isinstance(python, str) else _prepare(entry, lane, python, job(None), choice, say)
            if isinstance(python, Path) and problem is None:
                bench.open(lane, python, job)
            else:
                measured.facts[lane].notes.append(str(problem))
        say(f"{bench.num_settings} settings, {len(prompts)} prompts, {choice.repeats} repeats")
        bench.judge(*read_reference(target / "reference.npz"), choice.work / "logits.npy")
        bench.warm_up(prompts[0])
        total = bench.num_settings * len(prompts) * choice.repeats
        measured.runs = bench.run(prompts, n=choice.num_tokens, repeats=choice.repeats, on_run=lambda: on_run(total))
    finally:
        bench.close()
    return measured


def _source(model: str, work: Path, say: Say, texts: Path | None = None) -> Path:
    """Return the folder of a model's sources, made by a process that takes its torch threads with it."""
    folder = work.absolute() / Path(model).name
    say(f"{model}: {'source logits' if texts else 'source weights'}")
    command = [sys.executable, "-m", "benchmarks.peers.source", model, str(folder), *([str(texts)] if texts else [])]
    done = subprocess.run(command, cwd=_ROOT, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode < 0:
        raise PeersError(f"{model}: its reader was killed by signal {-done.returncode}: too little memory?")
    if done.returncode:
        raise PeersError(f"{model}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return folder


def _token_ids(choice: Choice, target: Path) -> list[PromptIds]:
    """Render the prompts with the chat template, once for all; those that leave no room are left out."""
    folder = target / "source"
    data = json.loads((folder / "vocabulary.json").read_text())
    vocabulary = Vocabulary(**{**data, "eos_token_ids": tuple(data["eos_token_ids"])})
    tokenizer = Tokenizer(folder, vocabulary, has_template=(folder / CHAT_TEMPLATE_FILE).is_file())
    prompts = []
    for prompt in choice.prompts:
        if tokenizer.has_chat_template:
            text = tokenizer.render([{"role": "user", "content": prompt.text}])
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode(prompt.text)
        if len(ids) + choice.num_tokens + _SPARE <= choice.capacity:
            prompts.append(PromptIds(prompt.category, ids))
    if not prompts:
        raise PeersError(f"no prompt leaves room for {choice.num_tokens} tokens in {choice.capacity}")
    return prompts


def _job(choice: Choice, lane: Lane, mode: str | None, target: Path, draft: Path | None, context: int) -> Job:
    precision = lane.variant.partition("/")[0]

    def model(folder: Path, suffix: str = "") -> Model:
        made = folder / f"{lane.peer}-{precision}{suffix}"
        return Model(source=folder / "source", gguf=folder / "gguf" / f"{precision}.gguf", folder=made)

    ours = model(target, f"-with-{draft.name}" if draft and lane.peer == "specrt" else "")
    if lane.peer == "specrt" and lane.variant in choice.artifacts:
        ours = Model(source=ours.source, gguf=ours.gguf, folder=choice.artifacts[lane.variant].absolute())
    return Job(
        variant=lane.variant, target=ours, draft=draft and model(draft, "-draft"), mode=mode,
        threads=choice.threads, context=context,
    )  # fmt: skip


def _prepare(entry: PeerEntry, lane: Lane, python: Path, job: Job, choice: Choice, say: Say) -> str | None:
    """Convert the models for a lane in a process of their own; return why it cannot be done."""
    if entry.needs_gguf and not job.target.gguf.exists():
        return "needs a model that comes as GGUF file, int4 one of about 4 bits"
    say(f"{lane}: prepare")
    try:
        worker = Worker(python, entry.module, job, choice.work / "logs" / f"{lane.peer}-{job.precision}-prepare.log")
        try:
            worker.ask("prepare")
        finally:
            worker.close()
    except WorkerError as error:
        return f"cannot be prepared: {error}"
    return None
