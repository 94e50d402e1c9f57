"""Life of a loaded artifact: one request at a time, ended in every way there is, and the next one works."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specrt
from copies import copy_artifact, edit_generation, refresh
from specrt import LanguageModel, Result, SpecRTError, language_model
from specrt.control import AdaptiveController, FixedController
from specrt.errors import BusyError, EngineError, ManifestError, RequestError
from specrt.machine import MachineFacts
from specrt.stream import Stream

PROMPT = "the quick brown"
CAPACITY = 128
DRAFTERS = ("none", "ngram", "suffix", "model", "combined")
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}


def output(result: Result) -> tuple[Any, ...]:
    return result.text, result.token_ids, result.finish_reason, result.stop, result.logprobs


def works(model: LanguageModel) -> bool:
    """Tell whether the model serves a request as if nothing had happened."""
    return len(model.generate(PROMPT, max_tokens=3).token_ids) == 3


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 1}, {"stop": "f f"}, {"logprobs": 1}])
def test_generate_and_stream_agree(tiny_model: LanguageModel, drafter: str, options: dict[str, Any]) -> None:
    whole = tiny_model.generate(PROMPT, max_tokens=40, drafter=drafter, **options)
    with tiny_model.stream(PROMPT, max_tokens=40, drafter=drafter, **{"seed": whole.params.seed, **options}) as stream:
        tokens = list(stream)
    assert output(stream.result) == output(whole)
    assert "".join(token.text for token in tokens) == whole.text
    assert tuple(token.id for token in tokens) == whole.token_ids
    if whole.logprobs is not None:
        assert tuple(token.logprob for token in tokens) == whole.logprobs


def test_the_text_is_the_text_of_the_ids(tiny_model: LanguageModel) -> None:
    for seed in range(5):
        result = tiny_model.generate(PROMPT, temperature=1.0, seed=seed, max_tokens=60)
        assert result.text == tiny_model.tokenizer.decode(result.token_ids)


def test_the_same_request_gives_the_same_output_after_any_other(tiny_model: LanguageModel) -> None:
    first = {drafter: output(tiny_model.generate(PROMPT, drafter=drafter, **LONG)) for drafter in DRAFTERS}
    assert len(set(first.values())) == 1
    tiny_model.generate("déjà vu " * 20, temperature=1.0, seed=3, max_tokens=40)
    tiny_model.generate([{"role": "user", "content": "x"}], max_tokens=2)
    with tiny_model.stream("some other text", max_tokens=50) as stream:
        next(stream)
    for drafter in DRAFTERS:
        assert output(tiny_model.generate(PROMPT, drafter=drafter, **LONG)) == first[drafter]


def test_the_seed_of_a_result_repeats_it(tiny_model: LanguageModel) -> None:
    first = tiny_model.generate(PROMPT, temperature=1.0, max_tokens=30)
    assert output(tiny_model.generate(PROMPT, temperature=1.0, max_tokens=30, seed=first.params.seed)) == output(first)


def test_a_result_before_the_end_holds_what_was_taken(tiny_model: LanguageModel) -> None:
    whole = tiny_model.generate(PROMPT, k=7, drafter="model", **LONG)
    with tiny_model.stream(PROMPT, k=7, drafter="model", **LONG) as stream:
        assert (stream.result.text, stream.result.token_ids, stream.result.finish_reason) == ("", (), "cancelled")
        for count in range(1, LONG["max_tokens"] + 1):
            next(stream)
            part = stream.result
            assert part.token_ids == whole.token_ids[:count]
            assert whole.text.startswith(part.text)
            assert part.finish_reason == ("length" if count == LONG["max_tokens"] else "cancelled")


def test_a_result_does_not_change_afterwards(tiny_model: LanguageModel) -> None:
    with tiny_model.stream(PROMPT, **LONG) as stream:
        next(stream)
        early = stream.result
        seen = (early.stats.num_steps, list(early.stats.proposed_by_position))
        list(stream)
    assert (early.stats.num_steps, early.stats.proposed_by_position) == seen
    assert stream.result.stats.num_steps > seen[0]


def test_a_stop_inside_a_block_is_not_reported_before_it_is_reached(tiny_model: LanguageModel) -> None:
    whole = tiny_model.generate(PROMPT, **LONG)
    stop = whole.token_ids[30]
    options: dict[str, Any] = {**LONG, "stop_token_ids": [stop], "k": 15, "drafter": "model"}
    count = whole.token_ids.index(stop) + 1
    with tiny_model.stream(PROMPT, **options) as stream:
        reasons = []
        for _ in range(count):
            next(stream)
            reasons.append((stream.result.finish_reason, stream.result.stop))
    assert reasons == [("cancelled", None)] * (count - 1) + [("stop", stop)]


def close_early(model: LanguageModel) -> None:
    stream = model.stream(PROMPT, **LONG)
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    assert stream.result.finish_reason == "cancelled"


def close_unstarted(model: LanguageModel) -> None:
    model.stream(PROMPT, **LONG).close()


def leave_the_block(model: LanguageModel) -> None:
    with model.stream(PROMPT, **LONG) as stream:
        next(stream)


def break_out(model: LanguageModel) -> None:
    for _ in model.stream(PROMPT, **LONG):
        break
    gc.collect()


def drop_it(model: LanguageModel) -> None:
    stream = model.stream(PROMPT, **LONG)
    next(stream)
    del stream
    gc.collect()


def consume(stream: Stream) -> None:
    """Take a token and fail."""
    for _ in stream:
        raise ZeroDivisionError


def fail_in_the_consumer(model: LanguageModel) -> None:
    with pytest.raises(ZeroDivisionError), model.stream(PROMPT, **LONG) as stream:
        consume(stream)


def fail_in_the_engine(model: LanguageModel) -> None:
    target: Any = model.target
    verify, target.verify = target.verify, lambda ids, parents: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model.generate(PROMPT)
    target.verify = verify


def refuse_an_option(model: LanguageModel) -> None:
    for options in ({"temprature": 1}, {"top_p": 0}, {"k": 99}, {"drafter": "x"}, {"stop_token_ids": [9999]}):
        with pytest.raises(RequestError):
            model.start(PROMPT, options)  # type: ignore[arg-type]


def refuse_a_prompt(model: LanguageModel) -> None:
    for prompt in ("", [], [9999], [5] * (CAPACITY + 1), None):
        with pytest.raises(RequestError):
            model.generate(prompt)  # type: ignore[arg-type]


def leave_no_token(model: LanguageModel) -> None:
    with pytest.raises(RequestError, match="no token is left"):
        model.generate(PROMPT, logit_bias=dict.fromkeys(range(384), float("-inf")), k=0)


def cancel_it(model: LanguageModel) -> None:
    with model.stream(PROMPT, **LONG) as stream:
        next(stream)
        stream.cancel()
        assert len(list(stream)) < 5
    assert stream.result.finish_reason == "cancelled"


def cancel_unstarted(model: LanguageModel) -> None:
    stream = model.stream(PROMPT, **LONG)
    stream.cancel()
    assert list(stream) == []


ENDINGS = (
    close_early,
    close_unstarted,
    leave_the_block,
    break_out,
    drop_it,
    fail_in_the_consumer,
    fail_in_the_engine,
    refuse_an_option,
    refuse_a_prompt,
    leave_no_token,
    cancel_it,
    cancel_unstarted,
)


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_the_next_request_works_however_the_last_one_ended(tiny_model: LanguageModel, ending: Any) -> None:
    expected = output(tiny_model.generate(PROMPT, **LONG))
    ending(tiny_model)
    assert output(tiny_model.generate(PROMPT, **LONG)) == expected


def test_a_second_request_meanwhile_is_refused(tiny_model: LanguageModel) -> None:
    with tiny_model.stream(PROMPT, **LONG) as stream:
        next(stream)
        for call in (lambda: tiny_model.generate("x"), lambda: tiny_model.stream("x"), tiny_model.close):
            with pytest.raises(BusyError, match="another request is in progress: finish or close its stream"):
                call()
        assert next(stream).id >= 0
    assert works(tiny_model)


def test_a_finished_stream_need_not_be_closed(tiny_model: LanguageModel) -> None:
    stream = tiny_model.stream(PROMPT, max_tokens=3)
    assert len(list(stream)) == 3
    assert works(tiny_model)
    assert len(stream.result.token_ids) == 3


def in_thread(action: Any) -> list[BaseException]:
    """Run an action in another thread; return what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return raised


def test_other_threads_may_use_it_one_at_a_time(tiny_model: LanguageModel) -> None:
    expected = output(tiny_model.generate(PROMPT, **LONG))
    results: list[Any] = []
    for _ in range(3):
        assert in_thread(lambda: results.append(output(tiny_model.generate(PROMPT, **LONG)))) == []
    assert results == [expected] * 3
    with tiny_model.stream(PROMPT, **LONG) as stream:
        next(stream)
        (error,) = in_thread(lambda: tiny_model.generate("x"))
        assert isinstance(error, BusyError)
    assert works(tiny_model)


def test_of_many_threads_at_once_each_is_served_right_or_told_busy(tiny_model: LanguageModel) -> None:
    expected = output(tiny_model.generate(PROMPT, **LONG))
    outcomes: list[Any] = []
    ready = threading.Barrier(6)

    def serve() -> None:
        ready.wait(30)
        for _ in range(5):
            try:
                outcomes.append(output(tiny_model.generate(PROMPT, **LONG)))
            except BusyError:
                outcomes.append("busy")

    threads = [threading.Thread(target=serve) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 30
    assert set(outcomes) <= {expected, "busy"}
    assert expected in outcomes
    assert works(tiny_model)


def test_cancel_from_another_thread_ends_after_the_step_in_progress(tiny_model: LanguageModel) -> None:
    whole = tiny_model.generate(PROMPT, **LONG)
    with tiny_model.stream(PROMPT, k=3, **LONG) as stream:
        taken = [next(stream), next(stream)]
        assert in_thread(stream.cancel) == []
        rest = list(stream)
    result = stream.result
    assert len(rest) <= 3
    assert result.token_ids == whole.token_ids[: len(taken) + len(rest)]
    assert result.finish_reason == "cancelled"
    assert works(tiny_model)


@contextlib.contextmanager
def held_in_a_step(model: LanguageModel, stream: Stream) -> Iterator[None]:
    """Let another thread take a token, and keep it inside the engine meanwhile."""
    target: Any = model.target
    verify, entered, leave = target.verify, threading.Event(), threading.Event()

    def slow(ids: Any, parents: Any) -> Any:
        entered.set()
        leave.wait(30)
        return verify(ids, parents)

    target.verify = slow
    thread = threading.Thread(target=lambda: next(stream))
    thread.start()
    assert entered.wait(30)
    try:
        yield
    finally:
        leave.set()
        thread.join(30)
        target.verify = verify


def test_what_another_thread_computes_cannot_be_closed_or_taken_from(tiny_model: LanguageModel) -> None:
    with tiny_model.stream(PROMPT, k=0, **LONG) as stream:
        with held_in_a_step(tiny_model, stream):
            for call in (stream.close, lambda: next(stream)):
                with pytest.raises(BusyError, match="another thread is taking a token"):
                    call()
            with pytest.raises(BusyError, match="another request is in progress"):
                tiny_model.close()
        assert len(stream.result.token_ids) == 1
        assert len(list(stream)) == LONG["max_tokens"] - 1
    assert works(tiny_model)


def test_cancel_during_a_step_lets_it_finish(tiny_model: LanguageModel) -> None:
    with tiny_model.stream(PROMPT, k=0, **LONG) as stream:
        with held_in_a_step(tiny_model, stream):
            stream.cancel()
        assert list(stream) == []
    assert (len(stream.result.token_ids), stream.result.finish_reason) == (1, "cancelled")


def load(folder: Path, cache: Path) -> LanguageModel:
    return specrt.load(folder, cache_dir=cache)


def test_close_may_be_called_again_and_use_afterwards_is_refused(tiny_artifact: Path, machine_cache: Path) -> None:
    model = load(tiny_artifact, machine_cache)
    model.close()
    model.close()
    with pytest.raises(EngineError, match="the artifact is closed: load it again"):
        model.generate(PROMPT)
    with pytest.raises(EngineError, match="closed"):
        model.target.verify([1])


def test_leaving_the_block_closes_it(tiny_artifact: Path, machine_cache: Path) -> None:
    with load(tiny_artifact, machine_cache) as model:
        assert works(model)
    with pytest.raises(EngineError, match="closed"):
        model.generate(PROMPT)
    with load(tiny_artifact, machine_cache) as model:
        model.close()


def test_leaving_the_block_ends_a_request_in_progress(tiny_artifact: Path, machine_cache: Path) -> None:
    with load(tiny_artifact, machine_cache) as model:
        stream = model.stream(PROMPT, **LONG)
        next(stream)
    assert list(stream) == []
    assert stream.result.finish_reason == "cancelled"
    with pytest.raises(EngineError, match="closed"):
        model.generate(PROMPT)


def test_an_error_in_the_block_is_not_hidden_by_an_open_stream(tiny_artifact: Path, machine_cache: Path) -> None:
    model = load(tiny_artifact, machine_cache)
    stream = model.stream(PROMPT, **LONG)
    with pytest.raises(ZeroDivisionError), model:
        consume(stream)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_to_load_anew(tiny_model: LanguageModel) -> None:
    stream = tiny_model.stream(PROMPT, **LONG)
    next(stream)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for call in (lambda: tiny_model.generate("x"), lambda: next(stream), tiny_model.close):
            try:
                call()
                said.append("nothing")
            except BaseException as error:
                said.append(f"{type(error).__name__}: {error}")
        try:
            tiny_model.__exit__()
            said.append("left")
        finally:
            os.write(writer, "\n".join(said).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        lines = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert len(lines) == 4
    assert all(line.startswith("BusyError: loaded in process") and "after the fork" in line for line in lines[:3])
    assert lines[3] == "left"
    assert next(stream).id >= 0
    stream.close()
    assert works(tiny_model)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("length", [1, 2, CAPACITY - 20, CAPACITY - 2, CAPACITY - 1])
def test_generation_goes_on_to_exactly_the_capacity(tiny_model: LanguageModel, length: int, drafter: str) -> None:
    prompt = [(7 * i) % 300 + 10 for i in range(length)]
    plain = tiny_model.generate(prompt, k=0, ignore_eos=True)
    assert (len(plain.token_ids), plain.finish_reason) == (CAPACITY - length, "capacity")
    for k in (1, 4, 15):
        result = tiny_model.generate(prompt, k=k, drafter=drafter, ignore_eos=True)
        assert output(result) == output(plain)


def test_a_prompt_that_fills_the_capacity_gives_nothing(tiny_model: LanguageModel) -> None:
    result = tiny_model.generate([5] * CAPACITY)
    assert (result.text, result.token_ids, result.finish_reason) == ("", (), "capacity")
    assert (result.stats.num_steps, result.stats.num_prompt_tokens, result.stats.tokens_per_s) == (0, CAPACITY, 0)
    assert works(tiny_model)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_max_tokens_0_gives_nothing(tiny_model: LanguageModel, drafter: str) -> None:
    result = tiny_model.generate(PROMPT, max_tokens=0, drafter=drafter, logprobs=2)
    assert (result.text, result.token_ids, result.finish_reason, result.logprobs) == ("", (), "length", ())


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_prompt_of_one_token_is_enough(tiny_model: LanguageModel, drafter: str) -> None:
    plain = tiny_model.generate([200], max_tokens=30, k=0)
    assert output(tiny_model.generate([200], max_tokens=30, drafter=drafter)) == output(plain)


def test_finish_reasons_name_their_cause(tiny_model: LanguageModel) -> None:
    free = tiny_model.generate(PROMPT, **LONG)
    token = free.token_ids[2]
    assert tiny_model.generate(PROMPT, max_tokens=5).finish_reason == "length"
    ended = tiny_model.generate(PROMPT, logit_bias={0: 50.0})
    assert (ended.finish_reason, ended.stop, ended.text) == ("stop", 0, "")
    stopped = tiny_model.generate(PROMPT, stop_token_ids=[token])
    assert (stopped.finish_reason, stopped.stop, stopped.token_ids[-1]) == ("stop", token, token)
    cut = tiny_model.generate(PROMPT, stop=[free.text[4:7], "never"])
    assert (cut.finish_reason, cut.stop) == ("stop", free.text[4:7])


def test_an_end_token_at_the_last_allowed_place_is_a_stop(tiny_model: LanguageModel) -> None:
    free = tiny_model.generate(PROMPT, **LONG)
    last = next(i for i, token in enumerate(free.token_ids) if token not in free.token_ids[:i] and i > 1)
    for drafter in DRAFTERS:
        result = tiny_model.generate(
            PROMPT, max_tokens=last + 1, stop_token_ids=[free.token_ids[last]], drafter=drafter, ignore_eos=True
        )
        assert (result.finish_reason, len(result.token_ids)) == ("stop", last + 1)


def test_the_artifacts_defaults_hold_until_overridden(tiny_artifact: Path, machine_cache: Path, tmp_path: Path) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")
    edit_generation(folder, temperature=0.8, top_k=7, max_tokens=5)
    with load(folder, machine_cache) as model:
        result = model.generate(PROMPT, ignore_eos=True)
        assert (result.params.temperature, result.params.top_k, len(result.token_ids)) == (0.8, 7, 5)
        result = model.generate(PROMPT, ignore_eos=True, temperature=0, top_k=0, max_tokens=9)
        assert (result.params.temperature, result.params.top_k, len(result.token_ids)) == (0, 0, 9)


def test_a_drafter_that_fails_costs_no_token(
    tiny_model: LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = tiny_model.generate(PROMPT, k=0, **LONG)
    tiny_model.generate(PROMPT, drafter="model", max_tokens=1)
    draft = tiny_model._engine("draft")
    monkeypatch.setattr(draft, "decode", lambda token: 1 / 0)
    result = tiny_model.generate(PROMPT, drafter="model", **LONG)
    assert output(result) == output(plain)
    assert result.stats.num_drafter_faults == 1
    assert "failed and was dropped" in str(result.stats.hint)
    assert "the model drafter failed: ZeroDivisionError" in caplog.text


def test_a_drafter_beyond_its_budget_costs_no_token(tiny_model: LanguageModel) -> None:
    plain = tiny_model.generate(PROMPT, k=0, **LONG)
    result = tiny_model.generate(PROMPT, drafter="model", draft_budget_ms=1e-6, **LONG)
    assert output(result) == output(plain)
    assert result.stats.num_drafter_faults == 1
    assert not tiny_model.generate(PROMPT, drafter="model", draft_budget_ms=1e6, **LONG).stats.num_drafter_faults


def test_a_seeds_text_is_not_left_to_the_clock(tiny_model: LanguageModel) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "coupling": "rejection", "draft_budget_ms": 5}
    with pytest.raises(RequestError, match=r"^draft_budget_ms: with coupling 'rejection' a seed's text"):
        tiny_model.generate(PROMPT, drafter="model", seed=1, **options)
    for more in ({"drafter": "model"}, {"drafter": "ngram", "seed": 1}):
        assert tiny_model.generate(PROMPT, max_tokens=2, **options, **more).token_ids  # type: ignore[typeddict-item]


def test_the_draft_is_opened_when_it_is_first_needed(tiny_model: LanguageModel) -> None:
    assert list(tiny_model._engines) == ["target"]
    tiny_model.generate(PROMPT, drafter="model", max_tokens=2)
    assert list(tiny_model._engines) == ["target", "draft"]


def test_a_draft_that_cannot_be_opened_is_an_error_that_leaves_the_model_usable(
    tiny_artifact: Path, machine_cache: Path, tmp_path: Path
) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")
    (folder / "draft.onnx").write_bytes(b"garbage")
    refresh(folder)
    with load(folder, machine_cache) as model:
        with pytest.raises(EngineError, match=r"draft\.onnx"):
            model.generate(PROMPT, drafter="model")
        assert len(model.generate(PROMPT, drafter="ngram", max_tokens=3).token_ids) == 3


def test_rows_that_depend_on_each_other_at_every_width_are_refused(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "measure_facts", lambda *_, **__: MachineFacts((), {}))
    with pytest.raises(EngineError, match="rows of a call influence each other at every width: not lossless"):
        load(tiny_artifact, tmp_path)


def test_the_loop_uses_only_widths_that_share_their_bits(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "measure_facts", lambda *_, **__: MachineFacts((4, 6), {4: 0.01, 6: 0.02}))
    with load(tiny_artifact, tmp_path) as model:
        assert model.max_k == 5
        with pytest.raises(RequestError, match=r"k: expected 0 \(plain\) to 5"):
            model.generate(PROMPT, k=6)
        model.generate(PROMPT, drafter="ngram", **LONG)
        assert {width for width, _ in model.target._calls} <= {4, 6, 16}  # type: ignore[attr-defined]


def test_k_is_adaptive_unless_given_and_fixed_where_a_seeds_text_depends_on_it(
    tiny_artifact: Path, machine_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for kind in (AdaptiveController, FixedController):
        record = lambda *args, kind=kind, **kw: (made.append(kind.__name__), kind(*args, **kw))[1]  # noqa: E731
        monkeypatch.setattr(language_model, kind.__name__, record)
    sampled: Any = {"temperature": 0.8, "coupling": "rejection", "drafter": "model"}
    with load(tiny_artifact, machine_cache) as model:
        for options in ({}, {"k": "auto"}, {"k": 3}, {"k": 0}):
            model.generate(PROMPT, **options, max_tokens=2)
        changes: list[dict[str, Any]] = [{}, {"seed": 1}, {"seed": 1, "k": 3}]
        for changed in [*changes, {"seed": 1, "drafter": "ngram"}, {"seed": 1, "coupling": "gumbel"}]:
            model.generate(PROMPT, **{**sampled, **changed}, max_tokens=2)
        with pytest.raises(RequestError, match="a seed's text depends on k"):
            model.generate(PROMPT, **sampled, seed=1, k="auto")
    assert [name[0] for name in made] == ["A", "A", "F", "F", "A", "F", "F", "A", "A"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("manifest.json", ManifestError),
        ("generation.json", ManifestError),
        ("tokenizer.json", SpecRTError),
        ("target.onnx", SpecRTError),
        ("target.onnx.data", SpecRTError),
    ],
)
def test_an_artifact_without_one_of_its_files_is_refused_by_the_files_name(
    tiny_artifact: Path, machine_cache: Path, tmp_path: Path, name: str, error: type[SpecRTError]
) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")
    (folder / name).unlink()
    with pytest.raises(error, match=name.replace(".", r"\.")) as caught:
        load(folder, machine_cache)
    assert "\n" not in str(caught.value)


def test_a_path_may_be_a_text(tiny_artifact: Path, machine_cache: Path) -> None:
    with specrt.load(str(tiny_artifact), cache_dir=machine_cache, threads=1) as model:
        assert works(model)


def test_defaults_that_no_request_could_have_are_the_artifacts_fault(
    tiny_artifact: Path, machine_cache: Path, tmp_path: Path
) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy")
    edit_generation(folder, temperature=-1.0)
    with pytest.raises(ManifestError, match=r"generation\.json: temperature: expected 0 \(greedy\) or more, found -1"):
        load(folder, machine_cache)


def test_a_template_that_the_manifest_does_not_list_is_not_used(
    tiny_artifact: Path, machine_cache: Path, tmp_path: Path
) -> None:
    folder = copy_artifact(tiny_artifact, tmp_path / "copy", lambda data: data["files"].pop("chat_template.jinja"))
    with load(folder, machine_cache) as model:
        assert not model.tokenizer.has_chat_template


def test_a_cache_folder_may_be_a_text(tiny_artifact: Path, tmp_path: Path) -> None:
    with specrt.load(tiny_artifact, cache_dir=str(tmp_path), threads=1) as model:
        assert works(model)


def test_a_stream_closed_from_many_threads_frees_the_model_once(tiny_artifact: Path, machine_cache: Path) -> None:
    with load(tiny_artifact, machine_cache) as model:
        freed: list[int] = []
        for turn in range(200):
            stream = model.stream(PROMPT, max_tokens=4)
            next(stream)
            release = stream._release[0]
            stream._release[0] = lambda release=release, turn=turn: (freed.append(turn), release())  # type: ignore[misc]
            errors = close_at_once(stream, threads=4)
            assert not [error for error in errors if not isinstance(error, BusyError)]
            stream.close()
        assert freed == list(range(200))
        assert works(model)


def close_at_once(stream: specrt.Stream, *, threads: int) -> list[BaseException]:
    """Close a stream from several threads at the same time; return what they raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(threads)

    def close() -> None:
        start.wait()
        try:
            stream.close()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=close) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return errors


def test_an_artifact_whose_logits_are_wrong_on_this_machine_is_refused(
    tiny_artifact: Path, machine_cache: Path, tmp_path: Path
) -> None:
    def promise_more(data: Any) -> None:
        data["engines"]["target"]["parity"]["mean_kl"] = -1e-5  # nothing can be as close

    folder = copy_artifact(tiny_artifact, tmp_path / "copy", promise_more)
    with pytest.raises(EngineError, match="on this machine its logits are not what they were at export"):
        load(folder, tmp_path / "cache")
