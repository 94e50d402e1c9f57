"""Text in and out: tokenizer, chat template, and detokenizing token by token."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from specrt.errors import TextError
from specrt_profiles.manifest import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Vocabulary

_CONTEXT = 6  # prompt tokens decoded along with the first output token, so that its leading space is known
_LONGEST_CONTEXT = 96  # where the prompt ends in characters made of single bytes: a run of them is decoded as a whole
_LONGEST_WAIT = 16  # tokens after which all but the last U+FFFD is given out, and tokens without text are dropped
_LONGEST_HALF = 3  # bytes, and so tokens, of a character that lacks its last
_HALF = "\ufffd"

_TEMPLATE_FAULTS = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
)  # fmt: skip

Message = Mapping[str, Any]


class Tokenizer:
    """The artifact's tokenizer and, if it has one, its chat template."""

    def __init__(self, folder: Path, vocabulary: Vocabulary, *, has_template: bool) -> None:
        from tokenizers import Tokenizer as Backend

        path = folder / TOKENIZER_FILE
        try:
            self._backend: Any = Backend.from_file(str(path))
        except Exception as error:
            raise TextError(f"{path}: not a readable tokenizer: {error}") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template_text = _read(folder / CHAT_TEMPLATE_FILE) if has_template else None
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
            where = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            reason = error if where is None else f"character {where} is half of a surrogate pair, not valid in UTF-8"
            raise TextError(f"the text cannot be tokenized: {reason}") from None
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def spelling(self, token_id: int) -> str:
        """Return how the vocabulary writes a token, special ones too; `#id` for an id that it does not have."""
        found: str | None = self._backend.id_to_token(token_id)
        return f"#{token_id}" if found is None else found

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """Return the text that the chat template makes of messages (`role`, `content`); a key that is None is left out.

        variables: what else the template may read (`tools`, `enable_thinking`, ...). Raises `TextError` when there is
        no template, or with the template's own words when it refuses the messages.
        """
        from jinja2 import TemplateError

        if self._template_text is None:
            raise TextError("the artifact has no chat template: give a text prompt instead of messages")
        try:
            template = _environment().from_string(self._template_text)
            known = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens}
            given = [{key: value for key, value in m.items() if value is not None} for m in messages]
            text: str = template.render({**known, **(variables or {}), "messages": given})
        except TemplateError as error:
            raise TextError(f"the chat template refuses the messages: {_one_line(error)}") from None
        except _TEMPLATE_FAULTS as error:
            raise TextError(f"the chat template fails on the messages: {_one_line(error)}") from None
        return text

    def detokenizer(self, prompt: Sequence[int]) -> "IncrementalDetokenizer":
        """Return a detokenizer for the output that follows `prompt`."""
        return IncrementalDetokenizer(self, prompt)


class IncrementalDetokenizer:
    """Decodes a growing output; what it returns, joined, is the text of the output.

    A token can be part of a character, and a decoder may treat the first token of a text unlike the others. So
    each time a few tokens before the new ones are decoded with them, and what was not in the text before is new. A
    U+FFFD at the end may be the beginning of a character: it waits for the tokens after it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = _context(tokenizer, prompt)
        self._start = 0  # the window begins here
        self._settled = len(self._ids)  # the text of so many tokens has been given out
        self._given = len(self._window())  # characters of the window that have been given out

    def push(self, token_id: int) -> str:
        """Take a token; return the text that is now certain."""
        self._ids.append(token_id)
        text = self._window()
        certain = text.rstrip(_HALF)
        if len(certain) == len(text):
            return self._settle(text)
        if len(self._ids) - self._settled < _LONGEST_WAIT:
            return self._give(certain)
        piece = self._give(text[: -len(_HALF)])
        self._start = self._settled = len(self._ids) - _LONGEST_HALF
        self._given = len(self._window().removesuffix(_HALF))
        return piece

    def flush(self) -> str:
        """Return the text held back, with U+FFFD for bytes that never became a character."""
        return self._give(self._window())

    def _window(self) -> str:
        return self._tokenizer.decode(self._ids[self._start :])

    def _settle(self, text: str) -> str:
        """Give out a window that ends in a whole character, and move it on."""
        piece = self._give(text)
        if piece:
            self._start, self._settled = self._settled, len(self._ids)
            self._given = len(self._window())
        elif len(self._ids) - self._settled > _LONGEST_WAIT:
            self._ids.pop()  # another token without text
        return piece

    def _give(self, text: str) -> str:
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        return piece


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of a prompt, enough of them to begin with a whole character."""
    size = _CONTEXT
    while size < min(len(prompt), _LONGEST_CONTEXT) and _HALF in tokenizer.decode(prompt[-size:]):
        size += 1
    return list(prompt[-size:])


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path}: not readable as UTF-8: {error}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _environment() -> Any:
    """Return the sandbox that chat templates are written for (the settings and functions transformers gives them)."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}, which marks the assistant's own words for training: here its content alone."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: int | None = None,
        separators: tuple[str, str] | None = None, sort_keys: bool = False,
    ) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment
