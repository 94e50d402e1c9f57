"""The real models of the slow tests: exported once per run, or kept in the folder given by --artifacts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specrt.engine import Engine
from specrt_export.artifact import ExportRequest, export
from specrt_export.catalogue import catalogue, fetch
from specrt_export.cli import default_cache_dir
from specrt_export.progress import Progress
from specrt_profiles.profile import load_profile


def exported(
    folder: Path, name: str, model: str | None, *, draft: str = "ngram", heads: tuple[Path, ...] = (),
    add_to: Path | None = None, **profile: object,
) -> Path:  # fmt: skip
    """Return the artifact `name` in `folder`, exporting it if it is not there."""
    out = folder / name
    if not (out / "manifest.json").is_file():
        chosen = load_profile("cpu", **profile)
        request = ExportRequest(
            model=model, draft=draft, heads=heads, profile=chosen, out=out, cache_dir=default_cache_dir(), add_to=add_to
        )  # fmt: skip
        export(request, Progress())
    return out


def smollm(parent: Path) -> Path:
    """Return the default model as a transformers directory, which is read much faster than its GGUF file."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = parent / "smollm2"
    if not (folder / "tokenizer.json").is_file():
        path = fetch(catalogue()["smollm2-135m"], default_cache_dir(), lambda _: None)
        read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent, gguf_file=path.name))
        model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    return folder


def random_draft(parent: Path) -> Path:
    """Return a small random-weight Llama with the default model's tokenizer, as a transformers directory."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = parent / "random-draft"
    if not (folder / "config.json").is_file():
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=49152, max_position_embeddings=2048, eos_token_id=2, **sizes)
        LlamaForCausalLM(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(smollm(parent)).save_pretrained(folder)
    return folder


class Recorder:
    """The target, with every row of logits kept as the bytes that decided its position."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.rows: dict[int, bytes] = {}
        self.vocab_size, self.capacity, self.verify_widths = engine.vocab_size, engine.capacity, engine.verify_widths
        self.takes_trees = engine.takes_trees

    @property
    def kv_length(self) -> int:
        return self._engine.kv_length

    def prefill(self, token_ids: Sequence[int]) -> None:
        self._engine.prefill(token_ids)

    def rollback(self, length: int) -> None:
        self._engine.rollback(length)

    def keep(self, rows: Sequence[int]) -> None:
        self._engine.keep(rows)

    def verify(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> NDArray[np.float32]:
        start = self._engine.kv_length
        logits = self._engine.verify(token_ids, parents)
        self.rows |= {start + 1 + i: row.tobytes() for i, row in enumerate(logits)}
        return logits
