"""How conversations begin and change turns, in token ids, and what a target's own prompts grow from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrt_export.errors import ExportError
from specrt_profiles.prompts import parse_prompts

LONGEST_PROMPT = 512  # tokens; most of a row is left for answers
_MARKS = ("\u2603", "\u2602", "\u2604")

# Half of the conversations begin with none of these: what comes then is what the model was trained on most. The others
# make sure that every kind of work occurs.
OPENINGS = (
    "What is", "What are the", "Why", "How do I", "How does", "How many", "Who", "When was", "Where", "Which",
    "Can you", "Is it", "Explain", "Describe", "Compare", "Define", "List", "Give me", "Tell me", "I have", "I'm", "My",
    "Write a short story", "Write a poem", "Write an email", "Write an essay about", "Create a", "Design a", "Suggest",
    "Imagine you are", "You are a", "Act as", "Plan a", "Improve this", "Extract the", "Classify the following",
    "Here is a transcript of a meeting:\n\n", "Context: ", "Based on the text below, answer: ",
    "Translate into French: ", "Translate into German: ", "Translate to Chinese: ", "Translate this to English: ",
    "How do you say", "Solve", "Calculate", "Find the value of", "If a", "A train", "A store sells", "John has",
    "There are", "Prove that", "Convert", "Write a Python function", "Write a program", "Write a SQL query",
    "Write a JavaScript function", "Complete this function:\n\n```python\ndef ",
    "Implement the function below.\n\ndef ",
    "Fix the bug in this code:\n\n```python\n", "Add a parameter to this function:\n\n```python\ndef ",
    "请", "请写一篇", "什么是", "如何", "为什么", "介绍一下",
)  # fmt: skip
# Prompts that bring a text along, which is one that the model wrote before: before it, after it, whether the user goes
# on writing (a question), whether the text is code.
TASKS = (
    ("Summarize this text:\n\n", "", False, False),
    ("Summarize the article below in a few sentences.\n\n", "", False, False),
    ("", "\n\nSummarize the text above in one sentence.", False, False),
    ("Summarize the following with respect to this question: What are the main points?\n\n", "", False, False),
    ("Make a list of the key points of this report:\n\n", "", False, False),
    ("What is the main point of this?\n\n", "", False, False),
    ("Correct the grammar of this text:\n\n", "", False, False),
    ("Proofread the following and reply with the whole corrected text:\n\n", "", False, False),
    ("Rewrite this paragraph in simpler words:\n\n", "", False, False),
    ("Translate the following text into French:\n\n", "", False, False),
    ("Translate this into German:\n\n", "", False, False),
    ("Translate the following English text into Chinese:\n\n", "", False, False),
    ("Read this passage and answer the question after it.\n\n", "\n\nQuestion:", True, False),
    ("Context: ", "\n\nQuestion:", True, False),
    ("Answer the question with the passage below. Quote the sentence that supports your answer.\n\n",
     "\n\nQuestion:", True, False),
    ("Fix the bug in this code and reply with the whole corrected code:\n\n", "", False, True),
    ("Refactor this code:\n\n", "", False, True),
    ("Explain this code:\n\n", "", False, True),
    ("What does this code do?\n\n", "", False, True),
    ("Add comments to this code:\n\n", "", False, True),
    ("Rename the variables in this code, and change nothing else:\n\n", "", False, True),
    ("", "\n\nChange the code above so that it", True, True),
)  # fmt: skip
_FENCE = "```"
TEXT_OPENINGS = ("The", "def", "1", "I", "Question", "今", "In", "import")


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The fixed tokens of a conversation: before the user's text, between it and the answer, and after the answer.

    `ends`: tokens that end a turn when they are written. Without a chat template there is no answer: `between` and
    `after` are empty, and a text ends where the model ends it.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    ends: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A user turn about a text, in token ids before and after it.

    `open`: the user goes on writing after that. `code`: the text is fenced code.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    open: bool
    code: bool


def template_of(tokenizer: Any, eos_ids: int | Sequence[int] | None) -> Template:
    """Take a tokenizer's chat template apart by rendering a marked conversation."""
    before, between, after = chat_pieces(tokenizer)
    ends = set() if eos_ids is None else {eos_ids} if isinstance(eos_ids, int) else set(eos_ids)
    if between and between[0] in tokenizer.all_special_ids:
        ends.add(between[0])
    if not between:
        before = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    return Template(before=before, between=between, after=after, ends=frozenset(ends))


def user_starts(tokenizer: Any, prompts: Path | None) -> tuple[list[list[int]], bool]:
    """Return token ids that user turns begin with, and whether they are whole turns: a user's own prompts."""
    if prompts is None:
        openings = OPENINGS if tokenizer.chat_template else TEXT_OPENINGS
        return [tokenizer.encode(text, add_special_tokens=False) for text in openings], False
    try:
        text = prompts.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{prompts}: cannot be read as UTF-8 text: {error}") from None
    found = parse_prompts(text, str(prompts), error=ExportError)
    encoded = [tokenizer.encode(prompt.text, add_special_tokens=False) for prompt in found]
    kept = [ids for ids in encoded if 0 < len(ids) <= LONGEST_PROMPT]
    if not kept:
        raise ExportError(f"{prompts}: expected prompts of up to {LONGEST_PROMPT} tokens, found longer ones only")
    return kept, True


def tasks(tokenizer: Any) -> tuple[list[Task], int]:
    """Return the tasks around a text in token ids, and the token that code is fenced with."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    found = [Task(before=encode(a), after=encode(b), open=more, code=code) for a, b, more, code in TASKS]
    return found, encode(_FENCE)[0]


def chat_pieces(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return what a chat template puts before a first message, between message and answer, and before the next message.

    Three times nothing without a template, or with one that refuses such a conversation.
    """
    if not tokenizer.chat_template:
        return (), (), ()
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
    try:
        rest = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template may refuse anything
        return (), (), ()
    pieces = []
    for mark in _MARKS:
        piece, found, rest = rest.partition(mark)
        if not found:
            return (), (), ()
        pieces.append(tuple(tokenizer.encode(piece, add_special_tokens=False)))
    return pieces[0], pieces[1], pieces[2]
