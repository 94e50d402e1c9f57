"""Text that a model writes by itself: turns, rows, the batched decoder, sampling, shards."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import tiny
from specrt_export.distill.batch import decoding
from specrt_export.distill.rows import FIXED, GREEDY, SAMPLED, USER, Rows, WritingPlan, repeats
from specrt_export.distill.shards import TextShard, read_shard, shard_path, write_shard
from specrt_export.distill.turns import LONGEST_PROMPT, OPENINGS, TASKS, Task, Template, tasks, template_of, user_starts
from specrt_export.distill.writer import BatchSize, documents, pick, write_text
from specrt_export.errors import ExportError

END = 9
TEMPLATE = Template(before=(1, 2), between=(END, 3), after=(END, 4), ends=frozenset({END}))


def plan(**changes: Any) -> WritingPlan:
    settings = {"template": TEMPLATE, "starts": [[20, 21]], "complete": False, "bare": 0.0, "sampled": 0.0, **changes}
    return WritingPlan(**settings)


def rows(plan: WritingPlan, num_rows: int = 1) -> Rows:
    return Rows(plan, num_rows, np.random.default_rng(0))


def write(plan: WritingPlan, picks: Sequence[int], num_slots: int) -> Rows:
    """Feed one row; what it does not know by itself comes from `picks`."""
    found, left = rows(plan), list(picks)
    for _ in range(num_slots):
        picked = left.pop(0) if found.temperatures()[0] >= 0 else -1
        found.feed(np.array([picked]))
    assert not left
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model("llama", tmp_path_factory.mktemp("writer"))


@pytest.fixture(scope="module")
def tokenizer(source: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(source)


def test_pieces_of_the_template_make_the_conversations_that_it_renders(tokenizer: Any) -> None:
    template = template_of(tokenizer, 0)
    words = ["what is", "a fox", "and", "a dog"]
    roles = ["user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, words, strict=True)]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in words]
    ours = [*template.before, *ids[0], *template.between, *ids[1], *template.after, *ids[2], *template.between, *ids[3]]
    assert rendered.startswith(tokenizer.decode(ours))
    assert tokenizer.encode(rendered, add_special_tokens=False)[: len(ours)] == ours
    assert template.ends == {0, tokenizer.convert_tokens_to_ids("<|end|>")}


def test_without_a_chat_template_there_are_no_turns(tokenizer: Any) -> None:
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<|user|>")
    template = template_of(bare, [5, 6])
    assert (template.before, template.between, template.after) == ((1,), (), ())
    assert template.ends == {5, 6}
    found = write(plan(template=template), [7, 8, 5, 7], 8)
    assert [int(tokens[0]) for tokens in found.tokens] == [20, 21, 7, 8, 5, 20, 21, 7]
    assert [int(start[0]) for start in found.starts] == [0, 0, 0, 0, 0, 5, 5, 5]


def test_a_conversation_goes_through_its_turns() -> None:
    found = write(plan(), [30, END, 40, 41, END, 31, END, 42], 15)
    tokens = [int(tokens[0]) for tokens in found.tokens]
    roles = [int(roles[0]) for roles in found.roles]
    assert tokens == [20, 21, 30, END, 3, 40, 41, END, 4, 20, 21, 31, END, 3, 42]
    assert roles == [
        USER,
        USER,
        USER,
        FIXED,
        FIXED,
        GREEDY,
        GREEDY,
        GREEDY,
        FIXED,
        USER,
        USER,
        USER,
        FIXED,
        FIXED,
        GREEDY,
    ]


def test_a_long_enough_document_is_followed_by_another() -> None:
    found = write(plan(continue_below=5), [END, 40, 41, END, END, 50], 12)
    assert [int(tokens[0]) for tokens in found.tokens] == [20, 21, END, 3, 40, 41, END, 20, 21, END, 3, 50]
    assert [int(start[0]) for start in found.starts] == [0] * 7 + [7] * 5


def test_turns_have_their_limits() -> None:
    found = write(plan(user_limit=4, answer_limit=2), [30, 31, 40, 41], 9)
    assert [int(tokens[0]) for tokens in found.tokens] == [20, 21, 30, END, 3, 40, 41, 20, 21]
    assert int(found.starts[-1][0]) == 7


def test_given_prompts_are_whole_turns() -> None:
    found = write(plan(complete=True, starts=[[25]], bare=1.0), [40, END], 8)
    assert [int(tokens[0]) for tokens in found.tokens] == [25, END, 3, 40, END, 4, 25, END]


ANSWER = list(range(100, 132))
FENCE = 8
CODE = [FENCE, *range(200, 232), FENCE]
ABOUT_TEXT = Task(before=(50, 51), after=(52,), open=False, code=False)
ABOUT_CODE = Task(before=(60,), after=(), open=False, code=True)
QUESTION = Task(before=(70,), after=(71,), open=True, code=False)


def turns(tasks: Sequence[Task], picks: Sequence[int], num_slots: int) -> list[tuple[int, int]]:
    """Return tokens and roles of one row whose turns are all about a text where there is one."""
    chosen = plan(tasks=tasks, fence=FENCE, quoting=1.0, continue_below=1000)
    found = write(chosen, picks, num_slots)
    return [(int(token[0]), int(role[0])) for token, role in zip(found.tokens, found.roles, strict=True)]


def test_a_task_is_about_an_earlier_answer() -> None:
    given = [50, 51, *ANSWER, 52, END, 3]
    found = turns([ABOUT_TEXT, ABOUT_CODE], [END, *ANSWER, END, 40], 4 + 32 + 1 + 1 + len(given) + 1)
    assert [token for token, _ in found[:4]] == [20, 21, END, 3]
    assert found[37:38] == [(4, FIXED)]
    assert found[38:] == [*((token, FIXED) for token in given), (40, GREEDY)]


def test_the_user_goes_on_after_an_open_task() -> None:
    found = turns([QUESTION], [END, *ANSWER, END, 30, END, 40], 38 + 34 + 1 + 2 + 1)
    assert found[38 + 34 :] == [(30, USER), (END, FIXED), (3, FIXED), (40, GREEDY)]


def test_a_task_about_code_gets_the_code_of_an_answer() -> None:
    found = turns([ABOUT_TEXT, ABOUT_CODE], [END, 90, *CODE, 91, END, 40], 4 + 37 + 1 + 1 + 34 + 2 + 1)
    assert found[42:] == [*((token, FIXED) for token in [60, *CODE, END, 3]), (40, GREEDY)]


def test_short_answers_and_cut_code_are_no_texts() -> None:
    for answer in (ANSWER[:-1], [90, *CODE[:-1]], [FENCE, *ANSWER[:8], FENCE]):
        found = turns([ABOUT_TEXT, ABOUT_CODE], [END, *answer, END, END], 4 + len(answer) + 2 + 4)
        assert [token for token, _ in found[-4:]] == [20, 21, END, 3]


def test_tasks_in_the_words_of_a_tokenizer(tokenizer: Any) -> None:
    found, fence = tasks(tokenizer)
    assert len(found) == len(TASKS)
    assert tokenizer.decode(found[0].before) == TASKS[0][0]
    assert tokenizer.encode("```", add_special_tokens=False)[0] == fence


def test_shares_of_bare_turns_and_sampled_answers() -> None:
    chosen = Rows(plan(bare=0.3), 2000, np.random.default_rng(1))
    assert np.mean(chosen.temperatures() == 1.0) == pytest.approx(0.3, abs=0.04)
    chosen = Rows(plan(sampled=0.2), 2000, np.random.default_rng(1))
    for _ in range(4):
        chosen.feed(np.full(2000, END))
    assert np.mean(chosen.temperatures() > 0) == pytest.approx(0.2, abs=0.04)
    assert set(chosen.temperatures()) == {0.0, 0.7}
    chosen.feed(np.full(2000, 50))
    assert set(np.unique(chosen.roles[-1])) == {GREEDY, SAMPLED}


def test_a_loop_ends_the_document() -> None:
    found = rows(plan(answer_limit=1000))
    slots = 0
    while found.starts[-1][0] == 0 if found.starts else True:
        found.feed(np.array([END if slots == 2 else 40 + slots % 3]))
        slots += 1
        assert slots < 200
    assert slots > 96


@pytest.mark.parametrize(("period", "loops"), [(1, True), (7, True), (32, True), (33, False)])
def test_what_a_loop_is(period: int, loops: bool) -> None:
    text = np.arange(96) % period
    broken = np.where(np.arange(96) == 50, 99, text)
    assert repeats(np.stack([text, broken])).tolist() == [loops, False]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral-window", "gpt2", "qwen3"])
def test_every_row_is_computed_as_if_alone(family: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.make_model(family, tmp_path)).eval()
    rng = np.random.default_rng(0)
    tokens, attention = rng.integers(0, tiny.VOCAB_SIZE, (3, 70)), model.config._attn_implementation
    starts = np.stack([np.zeros(70, int), np.where(np.arange(70) < 20, 0, 20), np.where(np.arange(70) < 66, 30, 66)])
    starts[2, :30] = 0
    prefix = [5, 6, 7]
    with decoding(model, 3) as decoder:
        first = decoder.feed_prefix(prefix)
        found = torch.stack([decoder.step(tokens[:, t], starts[:, t]) for t in range(70)], 1)
    with torch.no_grad():
        torch.testing.assert_close(first[0], model(torch.tensor([prefix])).logits[0, -1], atol=2e-4, rtol=1e-4)
        for row in range(3):
            for begin in np.unique(starts[row]):
                own = tokens[row, starts[row] == begin]
                wanted = model(torch.tensor([[*prefix, *own]])).logits[0, 3:]
                torch.testing.assert_close(found[row, starts[row] == begin], wanted, atol=2e-4, rtol=1e-4)
    assert model.config._attn_implementation == attention


def test_picking() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0]] * 4)
    picked = pick(
        logits, np.array([0.0, -1.0, 1.0, 1.0]), np.array([0.0, 0.0, 0.9, 0.9]), np.array([0.0, 0.0, 0.2, 0.999])
    )
    assert picked.tolist() == [1, 0, 1, 2]


def test_drawn_tokens_follow_their_law() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).repeat(10_000, 1)
    uniform = (np.arange(10_000) + 0.5) / 10_000
    for temperature in (1.0, 0.5):
        picked = pick(logits, np.full(10_000, temperature), np.zeros(10_000), uniform)
        wanted = torch.softmax(logits[0] / temperature, -1).numpy()
        assert np.bincount(picked, minlength=4) / 10_000 == pytest.approx(wanted, abs=2e-4)


def test_a_shard_is_the_same_whenever_it_is_written(source: Path, tokenizer: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    starts, complete = user_starts(tokenizer, None)
    assert (len(starts), complete) == (len(OPENINGS), False)
    chat = WritingPlan(template=template_of(tokenizer, 0), starts=starts, complete=complete)
    size = BatchSize(rows=4, length=80)

    def shard(number: int) -> TextShard:
        counts: list[int] = []
        text = write_text(model, chat, size, seed=(0, number), on_step=counts.append)
        assert counts == [4] * 80
        return text

    first, other, again = shard(0), shard(1), shard(0)
    for name in ("tokens", "roles", "offsets"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    assert first.tokens.tolist() != other.tokens.tolist()


def test_greedy_answers_are_what_the_model_finds_likeliest(source: Path, tokenizer: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    starts, complete = user_starts(tokenizer, None)
    chat = WritingPlan(template=template_of(tokenizer, 0), starts=starts, complete=complete, sampled=0.0, user_limit=12)
    text = write_text(model, chat, BatchSize(rows=3, length=150), seed=(0, 0), on_step=lambda _: None)
    greedy = 0
    for begin, end in zip(text.offsets, text.offsets[1:], strict=False):
        ids, roles = text.tokens[begin:end].tolist(), text.roles[begin:end]
        with torch.no_grad():
            best = model(torch.tensor([ids])).logits[0, :-1].argmax(-1).numpy()
        answers = roles[1:] == GREEDY
        assert ids[: len(chat.template.before)] == list(chat.template.before)
        np.testing.assert_array_equal(best[answers], np.array(ids[1:])[answers])
        greedy += int(answers.sum())
    assert greedy > 50


def test_documents_are_cut_where_they_begin() -> None:
    found = rows(plan(), 2)
    for slot in range(40):
        found.feed(np.full(2, 50))
        found.starts[-1] = np.array([0 if slot < 18 else 18, 0 if slot < 30 else 30])
    text = documents(found, [1, 2])
    lengths = np.diff(text.offsets).tolist()
    assert lengths == [20, 24, 32]  # the last, of 10 tokens, is too short
    assert text.tokens[text.offsets[1] :][:2].tolist() == [1, 2]
    assert text.roles[text.offsets[1] :][:2].tolist() == [FIXED, FIXED]


def test_a_shard_on_disk(tmp_path: Path) -> None:
    shard = TextShard(
        tokens=np.arange(5, dtype=np.int32), roles=np.ones(5, np.uint8), offsets=np.array([0, 2, 5], np.int64)
    )
    path = shard_path(tmp_path, 3)
    write_shard(path, shard)
    found = read_shard(path)
    for name in ("tokens", "roles", "offsets"):
        np.testing.assert_array_equal(getattr(found, name), getattr(shard, name))
    assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ExportError, match="expected a shard of texts, found something else"):
        read_shard(path)


def test_prompts_of_a_user(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the fox"}\n{"turns": ["the dog", "again"]}\n', "utf-8")
    starts, complete = user_starts(tokenizer, path)
    assert [tokenizer.decode(ids) for ids in starts] == ["the fox", "the dog"]
    assert complete
    path.write_text('{"prompt": "%s"}' % ("x " * (2 * LONGEST_PROMPT)), "utf-8")
    with pytest.raises(ExportError, match="expected prompts of up to 512 tokens"):
        user_starts(tokenizer, path)
    with pytest.raises(ExportError, match="cannot be read as UTF-8"):
        user_starts(tokenizer, tmp_path / "none")
