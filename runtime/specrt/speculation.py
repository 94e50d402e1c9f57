"""How a request drafts: its options resolved against what the artifact and the machine offer."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from specrt.control import Controller
from specrt.drafters import ngram
from specrt.engine import KvEngine
from specrt.errors import RequestError
from specrt.machine import Choice
from specrt_profiles.drafter import EARLY_EXIT, HEADS
from specrt_profiles.manifest import LOOKUP, Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How a request drafts: the drafter by name, most tokens and seconds per proposal, where the drafters look.

    adaptive: k is where it begins, and from there on what pays within max_step_ms per step. tree: guesses may branch.
    controller: the request's own, which decides instead.
    """

    drafter: str
    k: int
    adaptive: bool
    max_step_ms: float | None
    controller: Controller | None
    prompt_lookup_max: int
    prompt_lookup_min: int
    suffix_cache: bool
    draft_budget_s: float | None
    strict: bool
    tree: bool


def default_drafter(manifest: Manifest, *, has_features: bool) -> str:
    """Return the drafter of requests that name none: the artifact's, or the part that runs without features."""
    default = manifest.default_drafter
    if has_features or not manifest.reads_target(default):
        return default
    return (manifest.parts(default) or (LOOKUP,))[0]


def runnable(manifest: Manifest, target: KvEngine) -> tuple[str, ...]:
    """Return the drafters of an artifact that run on its target: heads read features, early exits need an exit."""
    missing = {*(HEADS if target.features is None else ()), *((EARLY_EXIT,) if target.exit is None else ())}
    kinds = {name: spec.kind for name, spec in manifest.all_drafters.items()}
    return tuple(
        name for name in manifest.drafter_names
        if missing.isdisjoint(kinds[part] for part in manifest.parts(name) or (name,))
    )  # fmt: skip


def resolve_speculation(
    given: Mapping[str, Any], *, drafters: Mapping[str, int], default: str, choice: Choice | None, max_k: int,
    trees: Collection[str] | None,
) -> Speculation:  # fmt: skip
    """Fill what `given` leaves out, by the machine's choice if no other drafter is named, else by the artifact.

    drafters: the default k of each. trees: those that can propose trees, None for an artifact that takes none.

    Raises `RequestError` for an unknown drafter, a k above the ladder, or trees where there are none.
    """
    if choice is not None and "drafter" not in given:
        default = choice.drafter
        chosen = {} if "k" in given or "controller" in given else {"k": choice.k, "max_step_ms": choice.max_step_ms}
        given = chosen | dict(given)
        given = {"tree": True, "strict": True} | dict(given) if choice.tree else given
    drafter = given.get("drafter", default)
    if drafter not in (*drafters, "none"):
        raise RequestError(f"drafter: the artifact has {', '.join((*drafters, 'none'))}, found {drafter!r}")
    asked = given.get("k", "auto")
    k = min(drafters.get(drafter, 0), max_k) if asked == "auto" else int(asked)
    if not 0 <= k <= max_k:
        raise RequestError(f"k: expected 0 (plain) to {max_k} (the widest verify call less one), found {k}")
    max_step_ms = given.get("max_step_ms")
    if max_step_ms is not None and (asked != "auto" or not max_step_ms > 0):
        raise RequestError(f"max_step_ms: expected a number above 0, with k 'auto', found {max_step_ms}, k {asked!r}")
    controller = given.get("controller")
    decided = [name for name in ("k", "max_step_ms") if controller is not None and name in given]
    if decided:
        raise RequestError(f"{decided[0]}: a controller decides how many tokens: leave out one of them")
    longest = int(given.get("prompt_lookup_max", max(ngram.DEFAULT_MAX, given.get("prompt_lookup_min", 0))))
    shortest = int(given.get("prompt_lookup_min", min(ngram.DEFAULT_MIN, longest)))
    ngram.check_sizes(max_ngram=longest, min_ngram=shortest)
    budget_ms = given.get("draft_budget_ms")
    if budget_ms is not None and not 0 < budget_ms < math.inf:
        raise RequestError(f"draft_budget_ms: expected above 0, found {budget_ms}")
    return Speculation(
        drafter=drafter, k=k, adaptive=asked == "auto", max_step_ms=max_step_ms, controller=controller,
        prompt_lookup_max=longest, prompt_lookup_min=shortest, suffix_cache=given.get("suffix_cache", False),
        draft_budget_s=None if budget_ms is None else budget_ms / 1e3, strict=given.get("strict", False),
        tree=given.get("tree", False) and _can_branch(drafter, k, trees),
    )  # fmt: skip


def _can_branch(drafter: str, k: int, trees: Collection[str] | None) -> bool:
    """Tell whether there are any guesses; raises `RequestError` where they cannot branch."""
    if k == 0 or drafter == "none":
        return False
    if trees is None:
        raise RequestError("tree: the artifact takes chains only: export it with --trees, or leave it out")
    if drafter not in trees:
        raise RequestError(f"tree: expected a drafter of trees ({', '.join(trees)}), found {drafter!r}")
    return True


def check_repeatable(how: Speculation, given: Mapping[str, Any], *, combined: bool) -> None:
    """Raise `RequestError` for options with which the text of a seed would not be the same again.

    For requests with a seed whose guesses are drawn from a law: what is guessed decides which of the texts comes out.
    """
    if given.get("k") == "auto" or how.max_step_ms is not None:
        raise RequestError("k: with coupling 'rejection' a seed's text depends on k: give it, or leave out seed")
    others = {
        "controller": how.controller is not None,
        "draft_budget_ms": how.draft_budget_s is not None,
        "suffix_cache": combined and how.suffix_cache,
    }
    for name, is_set in others.items():
        if is_set:
            raise RequestError(f"{name}: with coupling 'rejection' a seed's text depends on it: leave out one of them")
