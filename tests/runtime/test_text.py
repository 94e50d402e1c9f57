"""Tokenizer and chat template: the same as the libraries they come from, and one line when they fail."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from specrt.errors import TextError
from specrt.text import Tokenizer
from specrt_profiles.manifest import read_manifest

TEXTS = (
    "",
    " ",
    "  two  spaces ",
    "\n\n\tline\r\n",
    "Hello, world!",
    "def f(x):\n    return x ** 2\n",
    "naïve café, Ångström, A\u0301 versus Á",
    "你好，世界。日本語 한국어",
    "🙂👩‍👩‍👧‍👦🇨🇭",
    "مرحبا",
    "<|user|>hi<|end|>",
    "\x00\x01",
)
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'naïve "café" <b>&</b> 你好 🙂\n'},
    {"role": "assistant", "content": "  yes  ", "tool_calls": None},
    {"role": "assistant", "content": None, "name": None},
    {"role": "user", "content": "more"},
]
TEMPLATES = {
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}[{{ m.content }}]"
        "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}"
    ),
    "tojson": (
        "{{ messages | tojson }}|{{ messages[1] | tojson(indent=2) }}|{{ 'é' | tojson(ensure_ascii=true) }}|"
        "{{ {'b': 1, 'a': [none, true]} | tojson(sort_keys=true, separators=(',', ':')) }}"
    ),
    "strftime_now": "{{ strftime_now('%Y') }}{{ messages[0].content }}",
    "whitespace": (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n  U: {{ m.content }}\n"
        "    {%- elif m.role == 'assistant' -%}\n  A: {{ m.content | trim }}\n    {% endif %}\n{% endfor %}\n  end\n"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}\n"
        "{% generation %}\n  {{ m.content }}{{ loop.index }}\n{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    ),
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}|{{ unk_token is defined }}",
    "namespace and macro": (
        "{% macro show(m) %}<{{ m['role'] | upper }}>{{ m.get('name', 'nobody') }}{% endmacro %}"
        "{% set ns = namespace(n=0) %}"
        "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ show(m) }}{% endfor %}{{ ns.n }}"
    ),
    "tools and documents": "{{ tools is none }}{{ documents is none }}{% if tools %}T{% endif %}",
    "generation prompt": "{{ messages[-1].content }}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "undefined": "{{ nothing }}{{ messages[0].nothing }}",
    "trailing newline": "{{ messages[0].content }}\n",
    "keys that are None": "{% for m in messages %}{{ m.name is defined }}{{ m.content }}|{% endfor %}",
}
ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append.__self__.__class__ }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% include 'other' %}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
)

MakeTokenizer = Callable[[str | None], Tokenizer]


@pytest.fixture
def with_template(tiny_artifact: Path, tmp_path: Path) -> MakeTokenizer:
    """Return a function that gives the tiny tokenizer with another chat template, or none."""

    def make(template: str | None) -> Tokenizer:
        shutil.copy(tiny_artifact / "tokenizer.json", tmp_path)
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
        return Tokenizer(tmp_path, read_manifest(tiny_artifact).vocabulary, has_template=template is not None)

    return make


@pytest.fixture
def tokenizer(tiny_artifact: Path) -> Tokenizer:
    return Tokenizer(tiny_artifact, read_manifest(tiny_artifact).vocabulary, has_template=True)


@pytest.fixture(scope="module")
def theirs(tiny_source: Path) -> Any:
    """The same tokenizer in transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(tiny_source)


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_like_the_library(tokenizer: Tokenizer, tiny_artifact: Path, text: str) -> None:
    backend = Backend.from_file(str(tiny_artifact / "tokenizer.json"))
    ids = backend.encode(text).ids
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == backend.decode(ids)


def test_special_tokens_are_added_unless_told_otherwise(tiny_artifact: Path, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    backend = Backend.from_file(str(tiny_artifact / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path, read_manifest(tiny_artifact).vocabulary, has_template=False)
    assert tokenizer.encode("the") == [1, *tokenizer.encode("the", add_special_tokens=False)]


def test_decode_leaves_special_tokens_out(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("<|user|>the fox<|end|>")) == "the fox"


def test_truncation_and_padding_of_the_file_do_not_apply(tiny_artifact: Path, tmp_path: Path) -> None:
    backend = Backend.from_file(str(tiny_artifact / "tokenizer.json"))
    ids = backend.encode("the quick brown fox").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=512)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert (
        Tokenizer(tmp_path, read_manifest(tiny_artifact).vocabulary, has_template=False).encode("the quick brown fox")
        == ids
    )


@pytest.mark.parametrize("content", [None, "", "{}", '{"version": "1.0"}', "\x00"])
def test_an_unreadable_tokenizer_is_named(tiny_artifact: Path, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TextError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer(tmp_path, read_manifest(tiny_artifact).vocabulary, has_template=False)


def test_half_a_surrogate_pair_is_refused_and_placed(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match="character 2 is half of a surrogate pair"):
        tokenizer.encode("ab\udcff")


@pytest.mark.parametrize("prompt", [True, False])
def test_the_own_template_renders_like_transformers(tokenizer: Tokenizer, theirs: Any, prompt: bool) -> None:
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    text = tokenizer.render(CHAT, {"add_generation_prompt": prompt})
    assert text == expected
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_like_transformers(with_template: MakeTokenizer, theirs: Any, name: str, prompt: bool) -> None:
    template = TEMPLATES[name]
    expected = theirs.apply_chat_template(CHAT, chat_template=template, tokenize=False, add_generation_prompt=prompt)
    assert with_template(template).render(CHAT, {"add_generation_prompt": prompt}) == expected


@pytest.mark.parametrize("template", ESCAPES)
def test_the_sandbox_refuses(with_template: MakeTokenizer, template: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TextError, match="the chat template"):
        with_template(template).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{x.__class__}'.format_map({'x': 1}) }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ [''.__class__ is defined] | select | list | join }}",
    ],
)
def test_an_unsafe_attribute_shows_nothing(with_template: MakeTokenizer, template: str) -> None:
    assert with_template(template).render(CHAT) == ""


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must\n alternate') }}",
        "{% if %}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[99].content.x }}",
        "{{ 'x' | nofilter }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a, b, c in messages %}{% endfor %}",
        "{{ messages | tojson(nonsense=1) }}",
    ],
)
def test_a_failing_template_is_one_line(with_template: MakeTokenizer, template: str) -> None:
    with pytest.raises(TextError, match="the chat template") as caught:
        with_template(template).render(CHAT)
    assert "\n" not in str(caught.value)


def test_the_words_of_a_template_that_refuses_are_kept(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match="refuses the messages: unknown role wizard"):
        tokenizer.render([{"role": "wizard", "content": "x"}])


def test_variables_reach_the_template_and_messages_stay_ours(with_template: MakeTokenizer) -> None:
    tokenizer = with_template("{{ tools }} {{ add_generation_prompt }} {{ messages | length }} {{ thinking }}")
    variables = {"tools": "T", "thinking": False, "add_generation_prompt": False, "messages": []}
    assert tokenizer.render(CHAT, variables) == f"T False {len(CHAT)} False"
    assert tokenizer.render(CHAT) == f"None True {len(CHAT)} "


def test_a_template_that_is_no_text_is_named(tiny_artifact: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_artifact / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TextError, match=r"chat_template\.jinja: not readable as UTF-8"):
        Tokenizer(tmp_path, read_manifest(tiny_artifact).vocabulary, has_template=True)


def test_a_template_that_fills_the_memory_is_refused(with_template: MakeTokenizer) -> None:
    with pytest.raises(TextError, match="the chat template fails on the messages"):
        with_template("{{ 'a' * 10 ** 18 }}").render(CHAT)


def test_messages_without_a_template_are_refused(with_template: MakeTokenizer) -> None:
    tokenizer = with_template(None)
    assert not tokenizer.has_chat_template
    with pytest.raises(TextError, match="no chat template: give a text prompt"):
        tokenizer.render(CHAT)
