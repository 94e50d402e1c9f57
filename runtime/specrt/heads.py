"""The heads of an artifact: opened at their first use, each with the tokens that it can guess."""

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specrt.drafters import Drafter
from specrt.drafters.eagle import EagleDrafter
from specrt.drafters.medusa import MedusaDrafter
from specrt.engine import HeadEngine, KvEngine, ParallelHeads, open_head, open_parallel_heads
from specrt.errors import ManifestError
from specrt.prefix_cache import PrefixCache
from specrt_profiles.drafter import DrafterSpec
from specrt_profiles.manifest import Manifest
from specrt_profiles.vocabulary import read_token_ids


class Heads:
    """Opens heads and makes drafters of them; `close` releases what was opened."""

    def __init__(self, folder: Path, manifest: Manifest, *, threads: int | None, device: str | None) -> None:
        self._folder, self._manifest, self._threads, self._device = folder, manifest, threads, device
        self._layered: dict[str, HeadEngine] = {}
        self._parallel: dict[str, ParallelHeads] = {}
        self._token_ids: dict[str, NDArray[np.int64]] = {}

    def drafter(self, name: str, target: KvEngine, prefixes: PrefixCache | None, *, tree: bool) -> Drafter:
        """Return the drafter `name` of the manifest for a request; `tree`: whether its guesses may branch.

        Raises `ManifestError` for damaged files, `EngineError` for a device that runs no heads.
        """
        spec, vocab_size, features = self._manifest.drafters[name], target.vocab_size, target.features
        ids = self.token_ids(spec, vocab_size)
        assert ids is not None
        if spec.kind == "medusa":
            heads = self._open_parallel(str(spec.engine))
            return MedusaDrafter(
                heads, features=self._known(features), token_ids=ids, vocab_size=vocab_size,
                tree=spec.tree if tree else None,
            )  # fmt: skip
        head = self._open(str(spec.engine))
        reuse = None if prefixes is None else partial(prefixes.reuse, head)
        return EagleDrafter(
            head, features=self._known(features), token_ids=ids, vocab_size=vocab_size, reuse=reuse, tree=tree
        )

    def close(self) -> None:
        """Release the heads."""
        for head in self._layered.values():
            head.close()
        for heads in self._parallel.values():
            heads.close()

    def _open(self, name: str) -> HeadEngine:
        if name not in self._layered:
            spec = self._manifest.heads[name]
            self._layered[name] = open_head(self._folder, spec, threads=self._threads, device=self._device)
        return self._layered[name]

    def _open_parallel(self, name: str) -> ParallelHeads:
        if name not in self._parallel:
            spec = self._manifest.heads[name]
            self._parallel[name] = open_parallel_heads(self._folder, spec, threads=self._threads, device=self._device)
        return self._parallel[name]

    def token_ids(self, spec: DrafterSpec, vocab_size: int) -> NDArray[np.int64] | None:
        """Return the tokens that a drafter can guess, None for all; raises `ManifestError` for a damaged file."""
        file = spec.tokens
        if file is None:
            return None
        if file not in self._token_ids:
            engines = {**self._manifest.engines, **self._manifest.heads}
            size = engines[str(spec.engine)].vocab_size
            self._token_ids[file] = read_token_ids(self._folder / file, size=size, vocab_size=vocab_size)
        return self._token_ids[file]

    def _known(self, features: NDArray[np.float32] | None) -> NDArray[np.float32]:
        if features is None:
            raise ManifestError(f"{self._folder}: has a head, but a target without features: export it again")
        return features
