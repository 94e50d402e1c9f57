"""Prompts of benchmarks: a user's file, or the built-in set."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from specrt.errors import RequestError
from specrt.language_model import LanguageModel
from specrt.requests import Options, Prompt, prompt_ids
from specrt_profiles.prompts import BenchPrompt as BenchPrompt
from specrt_profiles.prompts import parse_prompts


def load_prompts(path: Path | None, *, limit: int | None = None) -> list[BenchPrompt]:
    """Read a prompt file, the built-in set if `path` is None; keep the first `limit` prompts of each category."""
    name = str(path or "built-in prompts")
    try:
        text = (path or resources.files("specrt") / "data" / "prompts.jsonl").read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{name}: cannot be read as UTF-8 text: {error}") from None
    counts: dict[str, int] = {}
    prompts = []
    for prompt in parse_prompts(text, name, error=RequestError):
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
        if limit is None or counts[prompt.category] <= limit:
            prompts.append(prompt)
    return prompts


def as_request(prompt: BenchPrompt, *, chat: bool) -> Prompt:
    """Return what a request takes: a user's message, or the text to continue."""
    return [{"role": "user", "content": prompt.text}] if chat else prompt.text


def check_prompts(model: LanguageModel, prompts: Sequence[BenchPrompt], options: Options, *, chat: bool) -> None:
    """Raise `RequestError` for a prompt that the model cannot take, before any of them has cost time."""
    for number, prompt in enumerate(prompts, 1):
        try:
            prompt_ids(
                as_request(prompt, chat=chat), model.tokenizer, vocab_size=model.target.vocab_size,
                capacity=model.target.capacity, template_kwargs=options.get("chat_template_kwargs"),
            )  # fmt: skip
        except RequestError as error:
            raise RequestError(f"prompt {number} of {len(prompts)} ({prompt.category}): {error}") from None
