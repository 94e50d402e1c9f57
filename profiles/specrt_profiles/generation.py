"""generation.json: the sampling defaults that travel with a model."""

import json
from dataclasses import dataclass
from pathlib import Path

from specrt_profiles.codec import decode, encode
from specrt_profiles.errors import ManifestError
from specrt_profiles.manifest import GENERATION_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What a request gets for the parameters it leaves out.

    `temperature` 0 is greedy. The values are what transformers would use for the same model; a model whose
    configuration does not ask for sampling is decoded greedily.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None


def write_generation(folder: Path, defaults: GenerationDefaults) -> None:
    """Write generation.json."""
    (folder / GENERATION_FILE).write_text(json.dumps(encode(defaults), indent=1) + "\n", "utf-8")


def read_generation(folder: Path) -> GenerationDefaults:
    """Read generation.json; raises `ManifestError` for a missing file, a wrong type or an unknown key."""
    path = folder / GENERATION_FILE
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"{path}: not readable as JSON: {error}") from None
    return decode(GenerationDefaults, data, where=str(path), error=ManifestError)
