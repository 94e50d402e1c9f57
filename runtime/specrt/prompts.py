"""Prompt files for benchmarks: JSON lines with `category` and `turns` (of which the first is used)."""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from specrt.errors import RequestError


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt of a benchmark."""

    category: str
    text: str


def load_prompts(path: Path | None, *, limit: int | None = None) -> list[BenchPrompt]:
    """Read a prompt file, the built-in set if `path` is None; keep the first `limit` prompts of each category.

    Each line is an object with `turns` (a list of texts) or `prompt`, and optionally `category`.
    """
    name = str(path or "built-in prompts")
    try:
        text = (path or resources.files("specrt") / "data" / "prompts.jsonl").read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{name}: cannot be read as UTF-8 text: {error}") from None
    counts: dict[str, int] = {}
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        prompt = _parse(line, f"{name}, line {number}")
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
        if limit is None or counts[prompt.category] <= limit:
            prompts.append(prompt)
    if not prompts:
        raise RequestError(f"{name}: expected at least one prompt, found none")
    return prompts


def _parse(line: str, where: str) -> BenchPrompt:
    try:
        data = json.loads(line)
        turns = data["turns"] if "turns" in data else [data["prompt"]]
        if isinstance(turns, list) and isinstance(turns[0], str):
            return BenchPrompt(str(data.get("category", "all")), turns[0])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        pass
    raise RequestError(f"{where}: expected a JSON object with 'turns' or 'prompt', found {line[:60]!r}")
