"""From heads' files to what is built of them, whichever kind they are of."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specrt_export.decoder import Dialect
from specrt_export.distill.card import MedusaCard
from specrt_export.distill.features import taps
from specrt_export.eagle_engine import EagleRequest
from specrt_export.errors import ExportError
from specrt_export.exit_engine import ExitRequest
from specrt_export.exit_file import ExitFile
from specrt_export.head_engine import HeadRequest
from specrt_export.head_file import EagleFile, read_head
from specrt_export.head_graph import trace_head
from specrt_export.medusa_engine import MedusaRequest
from specrt_export.medusa_file import MedusaFile
from specrt_export.medusa_graph import trace_medusa
from specrt_export.medusa_tree import Node, best_tree, published_tree
from specrt_profiles.drafter import EARLY_EXIT
from specrt_profiles.profile import Profile
from specrt_profiles.tensors import DecoderDims


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """What reads the states of a target: heads, all of the same features, and an early exit."""

    heads: tuple[HeadRequest, ...] = ()
    exit: ExitRequest | None = None


def prepare_readers(
    files: Sequence[Path], early_exit: int | Literal["auto"] | None, config: Any, dims: DecoderDims, profile: Profile,
    dialect: Dialect,
) -> Readers:  # fmt: skip
    """Read, check and trace what `files` hold for the target that `config` and `dims` describe; profile: the target's.

    Raises `ExportError` for a file that is no head for such a target, or heads that do not go together.
    """
    read = [read_head(path, config, vocab_size=dims.vocab_size) for path in files]
    exits = [file for file in read if isinstance(file, ExitFile)]
    heads = tuple(_prepare(file, config, dims, profile, dialect) for file in read if not isinstance(file, ExitFile))
    kinds = [*(head.kind for head in heads), *(EARLY_EXIT for _ in exits)]
    if len(set(kinds)) < len(kinds):
        raise ExportError(f"--head: expected one file per drafter, found two for {max(kinds, key=kinds.count)}")
    if len({head.taps for head in heads}) > 1:
        raise ExportError(
            "--head: expected heads that read the same layers, found an EAGLE-3 head and another: export twice"
        )
    if not exits and early_exit is None:
        return Readers(heads=heads)
    if exits and early_exit is not None:
        raise ExportError(f"expected --early-exit or an exit's --head, found both: {exits[0].path} has its own layer")
    if profile.float_type != "float32":
        raise ExportError(
            f"--early-exit: expected --precision fp32, int8 or int4, found {profile.precision}: it runs on CPUs"
        )
    if any(head.taps for head in heads):
        raise ExportError(
            "--early-exit: expected no EAGLE-3 head beside it, which reads layers on both sides of the exit"
        )
    asked = ExitRequest(file=exits[0]) if exits else ExitRequest(layer=None if early_exit == "auto" else early_exit)
    asked.check(dims)
    return Readers(heads=heads, exit=asked)


def _prepare(
    head: EagleFile | MedusaFile, config: Any, dims: DecoderDims, profile: Profile, dialect: Dialect
) -> HeadRequest:  # fmt: skip
    guessable = dims.vocab_size if head.token_ids is None else len(head.token_ids)
    trees, widest = profile.trees, profile.verify_widths[-1]
    profile = replace(profile, precision=profile.draft_precision, kv_precision="same", trees=False, output="logits")
    if isinstance(head, MedusaFile):
        own = replace(dims, num_layers=0, feature_size=dims.hidden_size, vocab_size=guessable)
        return MedusaRequest(
            head=head, taps=(), dims=own, profile=profile, traced=trace_medusa(head, own, profile),
            tree=_tree(head, widest - 1) if trees else None,
        )  # fmt: skip
    layers = taps(head.layout, dims.num_layers)
    own = replace(dims, num_layers=1, feature_size=dims.hidden_size * max(1, len(layers)), vocab_size=guessable)
    traced = trace_head(config, head, dims.vocab_size, own, profile, dialect)
    return EagleRequest(head=head, config=config, taps=layers, dims=own, profile=profile, traced=traced)


def _tree(head: MedusaFile, size: int) -> tuple[Node, ...]:
    """Return the best tree by what a card tells of the heads, else the published one."""
    if isinstance(head.card, MedusaCard) and head.card.ranks:
        return best_tree(head.card.ranks[: head.num_heads], size=size)
    return published_tree(num_heads=head.num_heads, size=size)
