"""Prompts of benchmarks: a user's file, or the built-in set."""

from importlib import resources
from pathlib import Path

from specrt.errors import RequestError
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
