"""What a step of speculative decoding brings in and what it costs.

If every draft token is accepted with probability alpha, independently, a step with k of them gives
(1 - alpha^(k+1)) / (1 - alpha) tokens on average (Leviathan, Kalman and Matias 2023, https://arxiv.org/abs/2211.17192,
equation 1). In their theorem 3.8 a call of k + 1 rows costs as much as one of 1; here it costs what it was measured to.
"""


def expected_tokens(acceptance: float, k: int) -> float:
    """Return the mean tokens of a step whose k draft tokens are accepted with this probability each."""
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
