"""Which KV slots the rows of a call see, worked out in the graph from a few integers of the call."""

from collections.abc import Mapping

import torch

from specrt_export.errors import UnsupportedModelError
from specrt_profiles.profile import Profile


def seen_slots(inputs: Mapping[str, torch.Tensor], *, slots: int, window: int | None) -> torch.Tensor:
    """Return bool [B, 1, W, S]: what came before a row and the row itself, as far as the window reaches back.

    A slot's number is its token's position, so positions alone tell, but for the rows of a call that is a tree: there
    `tree_mask` does. The slot of its first row is that row's position. A tree is narrower than any window.

    Layers with one window share their mask: the optimizer merges what is computed twice.
    """
    number, position = torch.arange(slots), inputs["position_ids"]
    tree = inputs.get("tree_mask")
    if tree is None:
        seen = number <= position[:, :, None]
    else:
        width = tree.shape[-1]
        row = number - position[0, :1]  # of this call, that a slot belongs to
        before, own = row < 0, tree.index_select(2, row.clamp(0, width - 1))
        seen = before | (own & (row < width))
    if window is not None:
        seen = seen & (number > position[:, :, None] - window)
    return seen[:, None]


def window_within(window: int | None, profile: Profile) -> int | None:
    """Return an attention window, None where it reaches over all slots.

    Raises:
        UnsupportedModelError: rows of a tree could lie farther apart than the window.
    """
    if window is None or window >= profile.capacity:
        return None
    widest = profile.verify_widths[-1]
    if profile.trees and window < widest:
        raise UnsupportedModelError(
            f"attention window of {window} tokens: expected at least the widest verify call, {widest}, with trees: "
            "export without --trees or with fewer draft tokens"
        )
    return window
