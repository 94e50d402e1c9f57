"""From a head's file to what is built of it, whichever kind it is of."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from specrt_export.decoder import Dialect
from specrt_export.distill.card import MedusaCard
from specrt_export.distill.features import taps
from specrt_export.eagle_engine import EagleRequest
from specrt_export.exit_file import ExitFile
from specrt_export.head_engine import HeadRequest
from specrt_export.head_file import read_head
from specrt_export.head_graph import trace_head
from specrt_export.medusa_engine import MedusaRequest
from specrt_export.medusa_file import MedusaFile
from specrt_export.medusa_graph import trace_medusa
from specrt_export.medusa_tree import Node, best_tree, published_tree
from specrt_profiles.profile import Profile
from specrt_profiles.tensors import DecoderDims


def prepare_head(path: Path, config: Any, dims: DecoderDims, profile: Profile, dialect: Dialect) -> HeadRequest:
    """Read, check and trace a head for the target that `config` and `dims` describe; profile: the target's.

    Raises `ExportError` for a file that is no head for such a target.
    """
    head = read_head(path, config, vocab_size=dims.vocab_size)
    assert not isinstance(head, ExitFile)
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
