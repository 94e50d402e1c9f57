"""Every parameter with every drafter: the same output as plain decoding, and the parameter does something."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import specrt
from copies import copy_artifact, draft_with_target
from specrt import LanguageModel, Result, SamplingParams, Statistics
from specrt.acceptance import Proposal
from specrt.drafters.model import ModelDrafter

PROMPT = "def mean(values):"
LENGTH = 24
KS = (1, 3, 8, 15)
DRAFTERS = ("ngram", "suffix", "model", "combined", "ngram+model")
HEADED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("eagle", {"drafter": "eagle"}),
    ("eagle", {"drafter": "eagle", "tree": True, "strict": True}),
    ("eagle", {"drafter": "suffix", "tree": True, "strict": True}),
    ("eagle", {"drafter": "combined", "tree": True, "strict": True}),
    ("medusa", {"drafter": "medusa"}),
    ("medusa", {"drafter": "medusa", "tree": True, "strict": True}),
    ("medusa", {"drafter": "ngram+medusa", "tree": True, "strict": True}),
    ("exit", {"drafter": "early-exit"}),
    ("exit", {"drafter": "ngram+early-exit"}),
    ("exit", {"drafter": "combined", "tree": True, "strict": True}),
)
NEURAL = ("model", "combined", "ngram+model")
EOS = 0


@dataclass(frozen=True)
class Case:
    """A value for a parameter, and options that it is compared within; both may depend on a plain result."""

    value: Callable[[Result], Any]
    within: Callable[[Result], dict[str, Any]] = lambda bare: {}
    when_greedy: bool = True  # whether it shows at temperature 0


CASES = {
    "temperature": Case(lambda bare: 0.7),
    "top_k": Case(lambda bare: 2, when_greedy=False),
    "top_p": Case(lambda bare: 0.2, when_greedy=False),
    "min_p": Case(lambda bare: 0.5, when_greedy=False),
    "repetition_penalty": Case(lambda bare: 1.8),
    "frequency_penalty": Case(lambda bare: 2.0),
    "presence_penalty": Case(lambda bare: 2.0),
    "logit_bias": Case(lambda bare: {bare.token_ids[0]: -9.0, 60: 2.0}),
    "bad_words": Case(lambda bare: [bare.token_ids[1:3], bare.token_ids[:1]]),
    "min_tokens": Case(lambda bare: 10, lambda bare: {"stop_token_ids": bare.token_ids[2:3]}),
    "max_tokens": Case(lambda bare: 7),
    "stop": Case(lambda bare: bare.text[4:6]),
    "stop_token_ids": Case(lambda bare: bare.token_ids[4:5]),
    "ignore_eos": Case(lambda bare: True, lambda bare: {"logit_bias": {EOS: 30.0}}),
    "seed": Case(lambda bare: 2, when_greedy=False),
    "stream": Case(lambda bare: 1, when_greedy=False),
    "logprobs": Case(lambda bare: 3),
    "coupling": Case(lambda bare: "rejection", when_greedy=False),
}


@pytest.fixture(scope="module")
def model(tiny_artifact: Path, machine_cache: Path) -> Iterator[LanguageModel]:
    with specrt.load(tiny_artifact, cache_dir=machine_cache) as model:
        yield model


@pytest.fixture(scope="module")
def headed(
    trees_artifact: Path, medusa_artifact: Path, exit_artifact: Path, machine_cache: Path
) -> Iterator[dict[str, LanguageModel]]:
    """The tiny model with a head, with parallel ones, with an exit; with trees, which change no bit of its chains."""
    with (
        specrt.load(trees_artifact, cache_dir=machine_cache) as eagle,
        specrt.load(medusa_artifact, cache_dir=machine_cache) as medusa,
        specrt.load(exit_artifact, cache_dir=machine_cache) as left,
    ):
        yield {"eagle": eagle, "medusa": medusa, "exit": left}


@pytest.fixture(scope="module")
def twins(
    tiny_artifact: Path, machine_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LanguageModel]:
    """The tiny model with itself, at the same precision, as draft."""
    folder = copy_artifact(tiny_artifact, tmp_path_factory.mktemp("twins") / "artifact", draft_with_target)
    with specrt.load(folder, cache_dir=machine_cache) as model:
        yield model


def output(result: Result) -> tuple[Any, ...]:
    """Return everything of a result that must not depend on how it was drafted."""
    return result.text, result.token_ids, result.finish_reason, result.stop, result.logprobs, result.params


def shown(result: Result) -> tuple[Any, ...]:
    """Return what a user sees of a result."""
    return result.text, result.token_ids, result.finish_reason, result.logprobs


def check_statistics(stats: Statistics, num_tokens: int, k: int, *, tree: bool = False) -> None:
    assert stats.num_tokens == num_tokens
    assert 0 <= stats.num_accepted <= stats.num_proposed <= k * stats.num_steps
    assert sum(stats.proposed_by_position) == stats.num_proposed
    assert sum(stats.accepted_by_position) == stats.num_accepted
    assert sorted(stats.accepted_by_position, reverse=True) == stats.accepted_by_position
    assert tree or sorted(stats.proposed_by_position, reverse=True) == stats.proposed_by_position
    assert all(a <= b for a, b in zip(stats.accepted_by_position, stats.proposed_by_position, strict=True))
    assert stats.num_tokens <= stats.num_accepted + stats.num_steps
    assert stats.num_drafter_faults == 0
    assert 0 <= stats.acceptance_rate <= 1


def test_every_parameter_has_a_case() -> None:
    assert set(CASES) == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize("temperature", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_a_parameter_works_the_same_with_every_drafter(
    model: LanguageModel, headed: dict[str, LanguageModel], name: str, temperature: float
) -> None:
    case = CASES[name]
    common: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": LENGTH}
    bare = model.generate(PROMPT, k=0, **common)
    common |= case.within(bare)
    options = common | {name: case.value(bare)}
    without, plain = model.generate(PROMPT, k=0, **common), model.generate(PROMPT, k=0, **options)
    if temperature or case.when_greedy:
        assert shown(without) != shown(plain), "the parameter does nothing"
    else:
        assert shown(without) == shown(plain)
    for drafter in DRAFTERS:
        for k in KS:
            result = model.generate(PROMPT, k=k, drafter=drafter, **options)
            check_statistics(result.stats, len(result.token_ids), k)
            sampled = result.params.coupling == "rejection" and result.params.temperature > 0
            if drafter in NEURAL and sampled:
                again = model.generate(PROMPT, k=k, drafter=drafter, **options)
                assert output(result) == output(again)
            else:
                assert output(result) == output(plain), (drafter, k)
    for name_of_model, settings in HEADED:
        for k in KS[1::2]:
            result = headed[name_of_model].generate(PROMPT, k=k, **settings, **options)
            check_statistics(result.stats, len(result.token_ids), k, tree="tree" in settings)
            sampled = result.params.coupling == "rejection" and result.params.temperature > 0
            if sampled and "early-exit" in settings["drafter"]:
                assert output(result) == output(headed[name_of_model].generate(PROMPT, k=k, **settings, **options))
            else:
                assert output(result) == output(plain), (settings, k)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.05}, {"temperature": 0.05, "coupling": "rejection"}])
@pytest.mark.parametrize(
    ("name", "drafter"), [*(("", name) for name in DRAFTERS), ("medusa", "medusa"), ("exit", "early-exit")]
)
def test_speculation_does_happen(
    model: LanguageModel, headed: dict[str, LanguageModel], name: str, drafter: str, options: dict[str, Any]
) -> None:
    loaded = headed.get(name, model)
    stats = loaded.generate(PROMPT * 3, k=3, drafter=drafter, seed=1, max_tokens=40, ignore_eos=True, **options).stats
    assert stats.drafter == drafter
    assert stats.num_proposed > 0
    assert stats.num_accepted > 0


@pytest.mark.parametrize("options", [{"k": 0}, {"drafter": "none"}, {"drafter": "none", "k": 5}])
def test_plain_decoding_takes_one_call_per_token(model: LanguageModel, options: dict[str, Any]) -> None:
    result = model.generate(PROMPT, max_tokens=LENGTH, **options)
    stats = result.stats
    assert (stats.drafter, stats.num_steps, stats.num_proposed) == ("none", LENGTH, 0)
    assert stats.block_efficiency == 1.0
    assert output(result) == output(model.generate(PROMPT, max_tokens=LENGTH, k=0, seed=result.params.seed))


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "coupling": "rejection"}]
)
def test_a_draft_that_is_the_target_is_always_right(twins: LanguageModel, k: int, options: dict[str, Any]) -> None:
    result = twins.generate(PROMPT, k=k, drafter="model", seed=3, max_tokens=LENGTH, ignore_eos=True, **options)
    stats = result.stats
    assert stats.num_accepted == stats.num_proposed > 0
    assert stats.num_steps == -(-LENGTH // (k + 1)), "it proposed less than it could"


@pytest.mark.parametrize("k", KS)
def test_every_proposal_is_what_a_draft_without_a_past_would_make(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    propose, seen = ModelDrafter.propose, []

    def record(self: ModelDrafter, tokens: Sequence[int], limit: int) -> Proposal:
        proposal = propose(self, tokens, limit)
        seen.append((list(tokens), proposal.token_ids))
        return proposal

    monkeypatch.setattr(ModelDrafter, "propose", record)
    stats = model.generate(PROMPT, k=k, drafter="model", max_tokens=60, ignore_eos=True).stats
    assert 0 < stats.num_accepted < stats.num_proposed
    draft = model._engine("draft")
    for tokens, guesses in seen:
        draft.rollback(0)
        draft.prefill(tokens[:-1])
        token = tokens[-1]
        for guess in guesses:
            token = int(draft.decode(token).argmax())
            assert guess == token


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_no_end_token_occurs_before_min_tokens(model: LanguageModel, drafter: str) -> None:
    plain = model.generate(PROMPT, max_tokens=LENGTH, ignore_eos=True)
    ends = [plain.token_ids[2], EOS]
    options: dict[str, Any] = {"stop_token_ids": ends[:1], "min_tokens": 10, "logit_bias": {EOS: 20.0}}
    result = model.generate(PROMPT, max_tokens=LENGTH, drafter=drafter, **options)
    assert not set(ends) & set(result.token_ids[:10])
    assert (result.finish_reason, result.stop, len(result.token_ids)) == ("stop", EOS, 11)


@pytest.mark.parametrize("stream", [0, 1])
def test_another_stream_is_another_sample_of_the_same_seed(model: LanguageModel, stream: int) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": LENGTH}
    other = model.generate(PROMPT, stream=1 - stream, **options)
    assert other.token_ids != model.generate(PROMPT, stream=stream, **options).token_ids


@pytest.mark.parametrize("penalty", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_a_penalty_makes_repetition_rarer(model: LanguageModel, penalty: str) -> None:
    plain = model.generate(PROMPT, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {penalty: 3.0}
    punished = model.generate(PROMPT, max_tokens=40, ignore_eos=True, **options)
    assert len(set(punished.token_ids)) > len(set(plain.token_ids))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_bad_word_does_not_occur(model: LanguageModel, drafter: str) -> None:
    plain = model.generate(PROMPT, max_tokens=40, ignore_eos=True)
    word = plain.token_ids[4:6]
    result = model.generate(PROMPT, max_tokens=40, ignore_eos=True, bad_words=[word], drafter=drafter)
    assert word not in [result.token_ids[i : i + 2] for i in range(40)]
    assert result.token_ids != plain.token_ids


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_text_stops_before_the_stop_string_and_ids_after_it(model: LanguageModel, drafter: str) -> None:
    plain = model.generate(PROMPT, max_tokens=LENGTH, ignore_eos=True)
    stop = plain.text[6:9]
    result = model.generate(PROMPT, max_tokens=LENGTH, ignore_eos=True, stop=stop, drafter=drafter)
    assert (result.finish_reason, result.stop) == ("stop", stop)
    assert result.text == plain.text[: plain.text.index(stop)]
    assert stop in model.tokenizer.decode(result.token_ids)
    assert stop not in model.tokenizer.decode(result.token_ids[:-1])


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_are_of_the_models_own_law(model: LanguageModel, drafter: str, count: int) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "top_k": 3, "seed": 1, "logit_bias": {60: 4.0}}
    result = model.generate(PROMPT, logprobs=count, max_tokens=12, drafter=drafter, **options)
    ids = [*model.tokenizer.encode(PROMPT), *result.token_ids]
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    for index, entry in enumerate(result.logprobs):
        law = law_after(model, ids[: len(ids) - len(result.token_ids) + index])
        assert entry.logprob == pytest.approx(law[entry.token_id], abs=1e-6)
        best = sorted(range(len(law)), key=lambda token: (-law[token], token))[:count]
        assert [token for token, _ in entry.top] == best
        assert [value for _, value in entry.top] == pytest.approx([law[token] for token in best], abs=1e-6)


def law_after(model: LanguageModel, ids: list[int]) -> Any:
    """Return log-probabilities [V] straight from the engine."""
    import numpy as np

    model.target.rollback(0)
    model.target.prefill(ids[:-1])
    logits = model.target.verify(ids[-1:])[0].astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
