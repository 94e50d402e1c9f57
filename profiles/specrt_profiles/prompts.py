"""Prompt files: JSON lines with `turns` (of which the first is used) or `prompt`, and optionally `category`."""

import json
from dataclasses import dataclass

from specrt_profiles.errors import SpecRTError


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt, and the kind of work it asks for."""

    category: str
    text: str


def parse_prompts(text: str, name: str, *, error: type[SpecRTError]) -> list[BenchPrompt]:
    """Return the prompts of a file's text; raises `error` with `name` and line for what is none, or without any."""
    lines = enumerate(text.split("\n"), 1)
    prompts = [_parse(line, f"{name}, line {number}", error) for number, line in lines if line.strip()]
    if not prompts:
        raise error(f"{name}: expected at least one prompt, found none")
    return prompts


def _parse(line: str, where: str, error: type[SpecRTError]) -> BenchPrompt:
    try:
        data = json.loads(line)
        turns = data["turns"] if "turns" in data else [data["prompt"]]
        if isinstance(turns, list) and isinstance(turns[0], str):
            return BenchPrompt(str(data.get("category", "all")), turns[0])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        pass
    raise error(f"{where}: expected a JSON object with 'turns' or 'prompt', found {line[:60]!r}")
