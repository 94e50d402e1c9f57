"""Text in and out: tokenizer, chat template, and detokenizing token by token."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from specrt.errors import TextError
from specrt_profiles.manifest import Vocabulary

TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
_CONTEXT = 6  # prompt tokens decoded along with the first output token, so that its leading space is known
_LONGEST_WAIT = 16  # tokens after which text that still ends in half a character is given out as it is

Message = Mapping[str, Any]


class Tokenizer:
    """The artifact's tokenizer and chat template."""

    def __init__(self, folder: Path, vocabulary: Vocabulary) -> None:
        from tokenizers import Tokenizer as Backend

        path = folder / TOKENIZER_FILE
        try:
            self._backend: Any = Backend.from_file(str(path))
        except Exception as error:
            raise TextError(f"{path}: not a readable tokenizer: {error}") from None
        template = folder / CHAT_TEMPLATE_FILE
        self._template_text = template.read_text("utf-8") if template.is_file() else None
        self._special_tokens = dict(vocabulary.special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        return self._template_text is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with the model's special tokens around it unless told otherwise."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:
            raise TextError(f"the text cannot be tokenized: {error}") from None
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the text that the chat template makes of messages (`role`, `content`).

        Raises `TextError` when there is no template, or with the template's own words when it refuses the messages.
        """
        from jinja2 import TemplateError

        if self._template_text is None:
            raise TextError("the artifact has no chat template: give a text prompt instead of messages")
        try:
            template = _environment().from_string(self._template_text)
            text: str = template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except TemplateError as error:
            raise TextError(f"the chat template refuses the messages: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise TextError(f"the chat template fails on the messages: {error}") from None
        return text

    def detokenizer(self, prompt: Sequence[int]) -> "IncrementalDetokenizer":
        """Return a detokenizer for the output that follows `prompt`."""
        return IncrementalDetokenizer(self, prompt)


class IncrementalDetokenizer:
    """Decodes a growing output; what it returns, joined, is the text of the output.

    A token can be part of a character, and a decoder may treat the first token of a text unlike the others. So
    each time a few tokens before the new ones are decoded with and without them, and the difference is the new
    text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._start = 0  # the window begins here
        self._given = len(self._ids)  # tokens whose text has been given out

    def push(self, token_id: int) -> str:
        """Take a token; return the text that is now certain."""
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._ids) - self._given < _LONGEST_WAIT:
            return ""
        return self._give(text)

    def flush(self) -> str:
        """Return the text held back, with U+FFFD for bytes that never became a character."""
        return self._give(self._new_text())

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._given])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]

    def _give(self, text: str) -> str:
        if text:
            self._start, self._given = self._given, len(self._ids)
        return text


def _environment() -> Any:
    """Return the sandbox that chat templates are written for (the settings and functions transformers gives them)."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment
