"""Counters and histograms over requests for Prometheus; docs/metrics.md defines each of them.

A `Metrics` is told of every request once, when it has ended; nothing is counted per step.
"""

from typing import TYPE_CHECKING, Any

from specrt.stats import Statistics
from specrt.stream import Outcome
from specrt_profiles.extras import require

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_PREFIX = "specrt"
_COUNTERS = {  # name -> what it counts, by drafter; the names of speculation are vLLM's
    "spec_decode_num_drafts": "Steps in which proposed tokens were verified.",
    "spec_decode_num_draft_tokens": "Proposed tokens.",
    "spec_decode_num_accepted_tokens": "Accepted tokens; bonus and recovered tokens are none.",
    "verify_calls": "Verify calls of the target, those of plain steps included.",
    "generation_tokens": "Generated tokens.",
    "prompt_tokens": "Prompt tokens.",
    "prefix_cache_queries": "Prompt tokens that could have been reused from earlier requests.",
    "prefix_cache_hits": "Prompt tokens that were.",
    "prefix_cache_hit_requests": "Requests that reused any.",
    "drafter_faults": "Drafters that failed and were dropped.",
    "prefill_seconds": "Time of the target's prompts.",
    "draft_seconds": "Time of the drafter.",
    "verify_seconds": "Time of the target's verify calls.",
    "rest_seconds": "Time of everything else between prompt and last token.",
}
_PARTS = {  # name -> what it counts, by combined drafter and part; field of PartCounts
    "spec_decode_part_num_drafts": ("Steps whose proposed tokens were a part's.", "num_drafts"),
    "spec_decode_part_num_draft_tokens": ("Proposed tokens of a part.", "num_proposed"),
    "spec_decode_part_num_accepted_tokens": ("Accepted tokens of a part.", "num_accepted"),
}
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_HISTOGRAMS = {  # name -> what it shows, upper limits of its buckets
    "time_to_first_token_seconds": ("Seconds until the first token.", _SECONDS),
    "time_per_output_token_seconds": ("Seconds per token after the prompt.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of a request.", _TOKENS),
    "request_block_efficiency": ("Tokens per verify call of a request.", (1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16)),
}


class Metrics:
    """Counts the requests of the models that it was given to: `specrt.load(..., metrics=Metrics())`.

    registry: where they are exposed, for instance `prometheus_client.REGISTRY`; a registry of its own if left out.
    Safe to use from several threads. Raises `MissingExtraError` without prometheus-client.
    """

    def __init__(self, registry: "CollectorRegistry | None" = None) -> None:
        require("metrics", "prometheus_client")
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self.registry = CollectorRegistry() if registry is None else registry
        by = {"namespace": _PREFIX, "registry": self.registry}
        self._counters: dict[str, Any] = {
            name: Counter(name, text, ["drafter"], **by) for name, text in _COUNTERS.items()
        }
        self._accepted = Counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position.", ["drafter", "position"], **by
        )
        self._parts: dict[str, Any] = {
            name: Counter(name, text, ["drafter", "part"], **by) for name, (text, _) in _PARTS.items()
        }
        self._requests = Counter("requests", "Requests by what ended them.", ["drafter", "finish_reason"], **by)
        self._histograms: dict[str, Any] = {
            name: Histogram(name, text, ["drafter"], buckets=buckets, **by)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }

    def observe(self, stats: Statistics, outcome: Outcome) -> None:
        """Add one request."""
        drafter = stats.drafter
        for name, value in _counts(stats).items():
            self._counters[name].labels(drafter).inc(value)
        for position, accepted in enumerate(stats.accepted_by_position):
            self._accepted.labels(drafter, position).inc(accepted)
        for part, counts in stats.parts.items():
            for name, (_, field) in _PARTS.items():
                self._parts[name].labels(drafter, part).inc(getattr(counts, field))
        self._requests.labels(drafter, outcome).inc()
        for name, value in _samples(stats).items():
            self._histograms[name].labels(drafter).observe(value)

    def text(self) -> str:
        """Return everything in Prometheus' text format."""
        from prometheus_client import generate_latest

        text: str = generate_latest(self.registry).decode("utf-8")
        return text


def _counts(stats: Statistics) -> dict[str, float]:
    return {
        "spec_decode_num_drafts": stats.num_drafts,
        "spec_decode_num_draft_tokens": stats.num_proposed,
        "spec_decode_num_accepted_tokens": stats.num_accepted,
        "verify_calls": stats.num_calls,
        "generation_tokens": stats.num_tokens,
        "prompt_tokens": stats.num_prompt_tokens,
        "prefix_cache_queries": max(0, stats.num_prompt_tokens - 1),
        "prefix_cache_hits": stats.num_cached_tokens,
        "prefix_cache_hit_requests": stats.num_cached_tokens > 0,
        "drafter_faults": stats.num_drafter_faults,
        "prefill_seconds": stats.prefill_s,
        "draft_seconds": stats.draft_s,
        "verify_seconds": stats.verify_s,
        "rest_seconds": stats.rest_s,
    }


def _samples(stats: Statistics) -> dict[str, float]:
    """Return what a request adds to histograms; one without a token has no times and no efficiency."""
    sizes: dict[str, float] = {
        "request_prompt_tokens": stats.num_prompt_tokens,
        "request_generation_tokens": stats.num_tokens,
    }
    if not stats.num_tokens:
        return sizes
    return sizes | {
        "time_to_first_token_seconds": stats.first_token_s,
        "time_per_output_token_seconds": stats.decode_s / stats.num_tokens,
        "request_block_efficiency": stats.block_efficiency,
    }
