"""What a step of speculative decoding brings in and what it costs.

A step verifies a guess of up to k tokens in one call. With A_j the share of steps in which the guess at position j = 0,
1, ... was accepted (never more than the share in which there was one), it gives

    E(k) = 1 + A_0 + ... + A_(k-1)

tokens on average, the last of them the target's own. If every draft token is accepted with probability alpha,
independently, A_j = alpha^(j+1) and E(k) = (1 - alpha^(k+1)) / (1 - alpha) (Leviathan, Kalman and Matias 2023,
https://arxiv.org/abs/2211.17192, equation 1). A step takes

    D(k) + T(k + 1)

seconds: drafting, and the call of the verify width that takes k + 1 rows. Plain decoding gives 1 token in T(1), so the
speedup is E(k) T(1) / (D(k) + T(k + 1)). In theorem 3.8 of that paper a call of k + 1 rows costs as much as one of 1;
here it costs what it was measured to.

An often quoted formula is k a / (1 + D(k) / T(1)) with a the acceptance rate, accepted per proposed tokens. It leaves
out the token that the target gives in any case (a drafter that is never right would stop decoding), guesses shorter
than k, and the cost of rows (it promises too much of a large k).
"""

from collections.abc import Mapping, Sequence


def tokens_per_step(accepted: Sequence[float], k: int) -> float:
    """Return E(k) from the shares of steps A_j in which position j was accepted."""
    return 1.0 + sum(accepted[:k])


def seconds_per_step(proposed: Sequence[float], call_s: Mapping[int, float], k: int, draft_s: float) -> float:
    """Return D(k) + T(k + 1) where guesses may be shorter than k.

    proposed: shares of steps in which there was a guess at position j; call_s: seconds of a call, by rising width.
    """
    shares = [1.0, *proposed[:k], 0.0]
    lengths = [shares[n] - shares[n + 1] for n in range(len(shares) - 1)]
    return draft_s + sum(share * call_seconds(call_s, n + 1) for n, share in enumerate(lengths))


def call_seconds(call_s: Mapping[int, float], rows: int) -> float:
    """Return the seconds of the narrowest call that takes `rows` rows, of the widest if none does."""
    return next((seconds for width, seconds in call_s.items() if width >= rows), max(call_s.values()))


def popular_speedup(acceptance_rate: float, k: int, draft_cost_ratio: float) -> float:
    """Return k a / (1 + D / T(1)), to be compared with; see the module's text for what it leaves out."""
    return k * acceptance_rate / (1 + draft_cost_ratio)


def break_even_rate(block_efficiency: float, proposed: float) -> float:
    """Return accepted per proposed tokens that give `block_efficiency` tokens per step; above 1 where none can.

    proposed: mean tokens proposed per step, above 0. E is linear in this rate, whatever the shares by position.
    """
    return (block_efficiency - 1) / proposed


def expected_tokens(acceptance: float, k: float) -> float:
    """Return the mean tokens of a step whose k draft tokens (or levels) are accepted with this probability each."""
    return k + 1.0 if acceptance == 1 else (1 - acceptance ** (k + 1)) / (1 - acceptance)


def break_even_acceptance(block_efficiency: float, k: int) -> float | None:
    """Return the smallest acceptance in [0, 1) that gives `block_efficiency` tokens per step, None if none does."""
    if block_efficiency <= 1:
        return 0.0
    if block_efficiency >= k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < block_efficiency else (low, middle)
    return high
