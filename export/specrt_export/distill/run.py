"""From a model to a drafter: text that the target writes, its features, training, and the file."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from math import isnan
from pathlib import Path
from typing import Any

import torch

from specrt_export import support
from specrt_export.checkpoint import resolve
from specrt_export.decoder import decoder_layers
from specrt_export.distill.call import Call, DistillRequest, Meter, OutOfTimeError, train_on
from specrt_export.distill.card import (
    Card,
    HeadCard,
    MedusaCard,
    Target,
    check_head_path,
    fingerprint_of,
    tools,
    write_head,
)
from specrt_export.distill.data import Dataset, Texts, coverage, draft_vocabulary, load_texts
from specrt_export.distill.draft import DraftCard, check_draft_path, write_draft
from specrt_export.distill.exit import heal_exit, open_exit
from specrt_export.distill.features import check_output, collect
from specrt_export.distill.head import feature_layers, head_for
from specrt_export.distill.heal import PrunedHealing, healing_texts
from specrt_export.distill.linear import begin_linear
from specrt_export.distill.loss import block_efficiency, by_step
from specrt_export.distill.medusa import MedusaHeads, MedusaTraining, by_rank
from specrt_export.distill.prune import influence, kept_layers, pruned, resolve_layers
from specrt_export.distill.rows import WritingPlan
from specrt_export.distill.shards import read_shard, shard_path
from specrt_export.distill.start import Start, read_start
from specrt_export.distill.train import Trainer
from specrt_export.distill.turns import tasks, template_of, user_starts
from specrt_export.distill.work import Work, open_work
from specrt_export.distill.workers import WritingJob, write_shards
from specrt_export.exit_fit import check_exits
from specrt_export.progress import Progress
from specrt_export.tokenizer import load_tokenizer, tokens_of
from specrt_profiles.vocabulary import fingerprint

_HELD_OUT = 24_000  # tokens at most, and no more than a sixteenth of all
_INFLUENCE = 4096  # tokens that the influence of layers is measured over
_TEXT = "The quick brown fox jumps over the lazy dog"


def distill(request: DistillRequest, progress: Progress, *, clock: Callable[[], float] = time.monotonic) -> Path | None:
    """Train a head, an exit or a pruned draft; return its path, or None when the minutes ended before there was one.

    Whatever is complete is kept in `request.work`; the same request goes on from there. When the minutes end in the
    middle of training, the drafter is written as it is then.
    """
    (check_draft_path if request.layout == "pruned" else check_head_path)(request.out)
    call = Call(request, progress, clock, None if request.minutes is None else clock() + 60 * request.minutes)
    with progress.bytes(f"fetch {request.model}") as on_bytes:
        checkpoint = resolve(request.model, revision=request.revision, cache_dir=request.cache_dir, on_bytes=on_bytes)
    config = support.load_config(checkpoint)
    support.model_class(config)
    if request.layout == "pruned":
        resolve_layers(request.layers, int(config.num_hidden_layers))  # text takes hours: refuse before
    if request.layout == "eagle3":
        feature_layers(config, "eagle3")
    tokenizer = load_tokenizer(checkpoint)
    starts, complete = user_starts(tokenizer, request.prompts)
    with progress.step(f"load {checkpoint.name}"):
        model = support.load_model(checkpoint)
        weights = fingerprint_of(model)
        check_output(model, tokenizer.encode(_TEXT))
        decoder_layers(model)
        start = _start(request, model, checkpoint.name)
        if request.layout == "early-exit":
            check_exits(model, None if request.layers is None else [request.layers])
    template = template_of(tokenizer, model.generation_config.eos_token_id)
    about, fence = tasks(tokenizer) if template.between and not complete else ([], -1)
    plan = WritingPlan(template=template, starts=starts, complete=complete, tasks=about, fence=fence)
    work = open_work(request.work, _about_text(request, weights, plan))
    job = WritingJob(checkpoint=checkpoint, plan=plan, size=request.size, folder=work.texts, seed=request.training.seed)
    try:
        shards = _written(call, job, work)
        target = Target(name=checkpoint.name, vocabulary=fingerprint(tokens_of(tokenizer)), weights=weights)
        return _learned(call, model.to(torch.bfloat16), work, shards, target, tokenizer, checkpoint.documents, start)
    except OutOfTimeError:
        progress.say(f"the minutes are over; the same command goes on from {request.work}")
        return None


def _start(request: DistillRequest, model: Any, name: str) -> Start | None:
    if request.start is None:
        return None
    assert request.layout in ("eagle", "eagle3")
    return read_start(request.start, request.layout, model, name, ffn=request.ffn)


def _written(call: Call, job: WritingJob, work: Work) -> list[Path]:
    """Write what text is missing; return all shards."""
    request = call.request
    per_shard = request.size.rows * request.size.length
    numbers = range(max(1, round(request.tokens / per_shard)))
    missing = [number for number in numbers if not shard_path(work.texts, number).is_file()]
    meter = Meter(call, "write", len(missing) * per_shard)
    if missing and not write_shards(
        job, missing, processes=request.threads, out_of_time=call.out_of_time, on_tokens=meter.reached
    ):
        raise OutOfTimeError
    torch.set_num_threads(request.threads)
    return [shard_path(work.texts, number) for number in numbers]


def _learned(
    call: Call, model: Any, work: Work, shards: Sequence[Path], target: Target, tokenizer: Any,
    documents: dict[str, str], start: Start | None,
) -> Path:  # fmt: skip
    """Read the text, and make what is asked for."""
    layout = call.request.layout
    if layout == "early-exit":
        begin = open_exit(call, model, work, read_shard(shards[0]))
        texts = _read(call, model, work, shards, (begin.layer,), kind=f"exit-{begin.layer}")
        return heal_exit(call, model, work, texts, begin, target, held_out=_held_out(texts))
    if layout == "eagle3":
        texts = _read(call, model, work, shards, feature_layers(model.config, layout), kind=layout)
    else:
        texts = _read(call, model, work, shards, (), kind="eagle")
    if layout == "pruned":
        return _prune(call, model, work, texts, target, tokenizer, documents)
    return _train(call, model, work, texts, target, start)


def _read(
    call: Call, model: Any, work: Work, shards: Sequence[Path], layers: Sequence[int], *, kind: str
) -> list[Texts]:  # fmt: skip
    """Compute what features of a kind are missing, the inputs of `layers`."""
    folders = [work.features(kind, number) for number in range(len(shards))]
    left = [(path, folder) for path, folder in zip(shards, folders, strict=True) if not folder.is_dir()]
    meter = Meter(call, "read", len(left) * call.request.size.rows * call.request.size.length)
    for path, folder in left:
        if call.out_of_time():
            raise OutOfTimeError
        collect(model, read_shard(path), layers, folder, meter.add)
    return [load_texts(path, folder) for path, folder in zip(shards, folders, strict=True)]


def _train(
    call: Call, model: Any, work: Work, texts: list[Texts], target: Target, start: Start | None
) -> Path:  # fmt: skip
    request = call.request
    matrix = model.get_output_embeddings().weight.detach()
    if start is None:
        vocabulary = draft_vocabulary(texts, request.vocabulary_size, num_tokens=len(matrix))
    else:
        vocabulary = start.vocabulary
    rows = matrix[torch.from_numpy(vocabulary)]
    total, cut = sum(len(part.text.tokens) for part in texts), _held_out(texts)
    embed = model.get_input_embeddings()
    learn = Dataset(texts, embed, vocabulary, held_out=cut, measure=False)
    held = Dataset(texts, embed, vocabulary, held_out=cut, measure=True)
    trainer, sizes = _trainer(request, model, learn, rows, start)
    path = work.checkpoint(request.layout)
    about = {"tokens": total, "vocabulary": len(vocabulary), **sizes, **asdict(request.training)}
    if path.is_file():
        trainer.restore(path, about)
    elif start is not None:
        call.progress.say(f"{request.start}: {block_efficiency(trainer.measure(held)):.2f} tokens per target call")
    train_on(call, trainer, held, path, about)
    agreed = trainer.measure(held)
    trained = HeadCard(
        target=target, vocabulary_size=len(vocabulary), coverage=round(coverage(texts, vocabulary), 4), tokens=total,
        updates=trainer.state.update, planned_updates=trainer.state.updates, loss=round(trainer.state.loss, 4),
        agreement=by_step(agreed), block_efficiency=round(block_efficiency(agreed), 3), training=request.training,
        command=request.command, tools=tools(),
    )  # fmt: skip
    write_head(request.out, trainer.average, vocabulary, _card(trained, request, trainer, held, model.config))
    call.progress.say(
        f"head: {request.out.stat().st_size / 1e6:.1f} MB; chains of {len(agreed)} give "
        f"{trained.block_efficiency:.2f} tokens per target call on held-out answers"
    )
    return request.out


def _trainer(
    request: DistillRequest, model: Any, learn: Dataset, rows: torch.Tensor, start: Start | None
) -> tuple[Trainer | MedusaTraining, dict[str, Any]]:
    """Return the training of heads of the layout that is asked for, and what else it depends on."""
    if request.layout == "medusa":
        heads = MedusaHeads(rows.shape[1], num_heads=request.heads, num_blocks=request.blocks)
        of_medusa = {"heads": request.heads, "blocks": request.blocks}
        return MedusaTraining(heads, learn, rows, request.training), of_medusa
    assert request.layout != "pruned"
    assert request.layout != "early-exit"
    ffn = request.ffn if start is None else start.ffn
    head = head_for(model, request.layout, ffn=ffn, seed=request.training.seed)
    if start is not None:
        start.load(head)
    elif head.layout == "eagle":
        begin_linear(head, learn)
    sizes: dict[str, Any] = {"ffn": head.ffn, "start": None if start is None else start.digest}
    return Trainer(head, learn, rows, request.training), sizes


def _card(
    trained: HeadCard, request: DistillRequest, trainer: Trainer | MedusaTraining, held: Dataset, config: Any
) -> Card | MedusaCard:
    """Return a head's card, with what only its layout has."""
    known = {field.name: getattr(trained, field.name) for field in fields(trained)}
    if isinstance(trainer, MedusaTraining):
        ranks = by_rank(trainer.ranks(held))
        return MedusaCard(**known, layout="medusa", heads=request.heads, blocks=request.blocks, ranks=ranks)
    layout = trainer.head.layout
    return Card(**known, layout=layout, layers=feature_layers(config, layout), ffn=trainer.head.ffn)


def _prune(
    call: Call, model: Any, work: Work, texts: list[Texts], target: Target, tokenizer: Any, documents: dict[str, str]
) -> Path:
    """Drop layers, heal what is left, and write it; nothing is healed where `epochs` is 0."""
    request, plan = call.request, call.request.training
    influences = influence(model, texts[0].text, num_tokens=_INFLUENCE)
    layers = kept_layers(influences, resolve_layers(request.layers, len(influences) + 1))
    draft = pruned(model, layers)
    total = sum(len(part.text.tokens) for part in texts)
    learn, held, vocabulary = healing_texts(model, texts, request.vocabulary_size, held_out=_held_out(texts))
    matrix = model.get_output_embeddings().weight.detach()
    training = PrunedHealing(draft, learn, matrix, vocabulary, plan)
    before = training.measure(held)
    call.progress.say(
        f"layers {', '.join(map(str, layers))} of {len(influences) + 1}; greedy chains of 5 give "
        f"{block_efficiency(before):.2f} tokens per target call on held-out answers"
    )
    path = work.checkpoint(f"pruned-{len(layers)}")
    about = {"tokens": total, "vocabulary": request.vocabulary_size, "layers": list(layers), **asdict(plan)}
    if plan.epochs:
        if path.is_file():
            training.restore(path, about)
        train_on(call, training, held, path, about)
    agreed, state = training.measure(held), training.state
    card = DraftCard(
        target=target, vocabulary_size=len(vocabulary), coverage=round(coverage(texts, vocabulary), 4), layers=layers,
        influence=influences, tokens=total, updates=state.update,
        planned_updates=state.updates, loss=None if isnan(state.loss) else round(state.loss, 4),
        agreement_before=by_step(before), block_efficiency_before=round(block_efficiency(before), 3),
        agreement=by_step(agreed), block_efficiency=round(block_efficiency(agreed), 3), training=plan,
        command=request.command, tools=tools(),
    )  # fmt: skip
    write_draft(
        request.out, draft, training.average, card, tokenizer=tokenizer, token_ids=vocabulary, documents=documents
    )
    if plan.epochs:
        call.progress.say(f"healed: {card.block_efficiency:.2f} tokens per target call")
    return request.out


def _held_out(texts: Sequence[Texts]) -> int:
    return min(_HELD_OUT, sum(len(part.text.tokens) for part in texts) // 16)


def _about_text(request: DistillRequest, weights: str, plan: WritingPlan) -> dict[str, Any]:
    """Return what the text of a work folder depends on."""
    digest = hashlib.sha256(repr(plan).encode()).hexdigest()
    return {"weights": weights, "text": digest, "size": [request.size.rows, request.size.length],
            "seed": request.training.seed}  # fmt: skip
