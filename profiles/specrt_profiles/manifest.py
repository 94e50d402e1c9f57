"""The manifest: what an artifact holds, and the checks that a folder really is that artifact."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specrt_profiles.codec import OPTIONAL, decode, encode
from specrt_profiles.drafter import (
    BRANCHING,
    MODEL_FREE,
    READERS,
    DrafterKind,
    DrafterSpec,
    drafter_problem,
)
from specrt_profiles.errors import ManifestError
from specrt_profiles.exit import ExitSpec, exit_problem
from specrt_profiles.files import FileEntry, check_sizes
from specrt_profiles.plan import PlanSpec, plan_problem
from specrt_profiles.profile import DialectName, OutputName, Precision, Profile
from specrt_profiles.tensors import BEST_IDS, TOP_IDS, TOP_LOGSUMEXP, TensorSpec

SCHEMA = 1
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"  # present if the model has one
GENERATION_FILE = "generation.json"
COMBINED = "combined"  # stands for LOOKUP and the first drafter that the artifact brings; see `Manifest.parts`
LOOKUP: DrafterKind = "suffix"
_FORMAT: Literal["specrt-artifact"] = "specrt-artifact"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Where the weights of an engine came from."""

    name: str
    source: str
    revision: str | None
    architecture: str
    licence: str | None
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How far an exported graph is from its source model, over `num_rows` rows of logits.

    `max_abs_diff` is in logits; `mean_kl` and `max_kl` are KL(source || exported) in nats; `top1_agreement` is
    the share of rows with the same argmax. `perplexity` is exp of the mean negative log-likelihood, in nats, of the
    texts' next tokens, `source_perplexity` that of the source.
    """

    num_rows: int
    max_abs_diff: float
    mean_kl: float
    max_kl: float
    top1_agreement: float
    perplexity: float
    source_perplexity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine: its files, call shapes and tensor table.

    `weight_bytes` are the bytes of weights that a call reads; of a table that is only gathered from, it reads a few
    rows, which are not counted. `exact_widths` are the call widths whose rows were bit-equal on the exporting machine
    (decided anew on every machine that loads the artifact). With a `plan`, file and weights are the plan, and the graph
    it was built from stays behind. With an `exit`, the CPU runs its parts in the place of the whole graph.
    """

    dialect: DialectName
    file: str
    weights: str
    reference: str
    model: ModelInfo
    precision: Precision
    capacity: int
    slots: int
    prefill_width: int
    verify_widths: tuple[int, ...]
    vocab_size: int
    weight_bytes: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parity: Parity
    exact_widths: tuple[int, ...]
    plan: PlanSpec | None = field(default=None, metadata=OPTIONAL)
    exit: ExitSpec | None = field(default=None, metadata=OPTIONAL)

    @property
    def output(self) -> OutputName:
        """What a call gives; see `Profile.output`."""
        names = {tensor.name for tensor in self.outputs}
        return "top-k" if TOP_IDS in names else "argmax" if BEST_IDS in names else "logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The artifact's tokens: how many there are, a fingerprint of their content, the ids that end a text.

    `special_tokens` are the named ones (`bos_token`, ...) that a chat template may use.
    """

    num_tokens: int
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of manifest.json. `heads` are engines that read the target's features; see `tensors`."""

    format: Literal["specrt-artifact"] = _FORMAT
    schema: int = SCHEMA
    profile: Profile
    vocabulary: Vocabulary
    engines: Mapping[str, EngineSpec]
    drafters: Mapping[str, DrafterSpec]
    default_drafter: str
    tools: Mapping[str, str]
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    heads: Mapping[str, EngineSpec] = field(default_factory=dict, metadata=OPTIONAL)

    @property
    def target(self) -> EngineSpec:
        """The engine whose output is the output."""
        return self.engines["target"]

    @property
    def all_drafters(self) -> dict[str, DrafterSpec]:
        """The drafters that can be asked for: those that need no files, then those that the artifact brings."""
        return {**{kind: DrafterSpec(kind=kind) for kind in MODEL_FREE}, **self.drafters}

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The names of `all_drafters`, and `combined` if there is anything to combine."""
        return (*self.all_drafters, *([COMBINED] if self.parts(COMBINED) else []))

    def parts(self, drafter: str) -> tuple[str, str] | None:
        """Return the lookup and the neural drafter that `combined` or a name such as `ngram+model` stands for."""
        neural = [name for name, spec in self.drafters.items() if spec.kind not in MODEL_FREE]
        if drafter == COMBINED and neural:
            return LOOKUP, neural[0]
        lookup, _, other = drafter.partition("+")
        return (lookup, other) if lookup in MODEL_FREE and other in neural else None

    def reads_target(self, drafter: str) -> bool:
        """Tell whether a drafter, or a part of it, reads what the target computes, so that it cannot be replayed."""
        names = self.parts(drafter) or (drafter,)
        return any(name in self.drafters and self.drafters[name].kind in READERS for name in names)

    def of_trees(self, drafters: Iterable[str]) -> list[str]:
        """Return those drafters that can guess several tokens for one place, or that have a part that can."""
        branching = {name for name, spec in self.all_drafters.items() if spec.kind in BRANCHING}
        return [name for name in drafters if branching & {*(self.parts(name) or (name,))}]

    def default_k(self, drafter: str) -> int:
        """Return the k of a request that names none: the profile's for a draft model, else the most there is.

        Drafters without a model propose no more than they find worth its time.
        """
        spec = self.all_drafters.get(drafter)
        cheap = spec is not None and spec.kind in MODEL_FREE
        return self.profile.max_draft_tokens if cheap else self.profile.num_draft_tokens


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json, the last file of an artifact to be written."""
    text = json.dumps(encode(manifest), indent=1, ensure_ascii=False)
    (folder / MANIFEST_FILE).write_text(text + "\n", "utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of an artifact: schema, types, references between entries, file names and sizes.

    Raises `ManifestError` with the file, what was expected and what was found.
    """
    path = folder / MANIFEST_FILE
    data = _read_json(path)
    schema = data.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise ManifestError(
            f"{path}: schema {schema} is newer than {SCHEMA}, the newest this SpecRT reads: upgrade SpecRT"
        )
    if data.get("format") != _FORMAT or schema != SCHEMA:
        raise ManifestError(
            f"{path}: expected format {_FORMAT!r} with schema {SCHEMA}, found {data.get('format')!r} with {schema!r}"
        )
    manifest = decode(Manifest, data, where=str(path), error=ManifestError, complete=True)
    _check_references(manifest, path)
    check_sizes(folder, manifest.files)
    return manifest


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError(
            f"{path.parent}: no {path.name} there: expected a folder written by 'specrt export'"
        ) from None
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ManifestError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _check_references(manifest: Manifest, path: Path) -> None:
    problem = _problem(manifest)
    if problem:
        raise ManifestError(f"{path}: {problem}")


def _problem(manifest: Manifest) -> str | None:
    """Say which entries do not fit together."""
    if "target" not in manifest.engines:
        return f"engines: expected an engine named 'target', found {sorted(manifest.engines)}"
    for name in manifest.files:
        if Path(name).name != name or name in ("", ".", ".."):
            return f"{name!r} is not a plain file name: the manifest was tampered with"
    missing = [name for name in (TOKENIZER_FILE, GENERATION_FILE) if name not in manifest.files]
    if missing:
        return f"files: expected {missing[0]} among them, found {sorted(manifest.files)}"
    if manifest.default_drafter not in {*manifest.drafter_names, "none"}:
        return f"default_drafter: {manifest.default_drafter!r} is not among the drafters"
    ends = [token for token in manifest.vocabulary.eos_token_ids if not 0 <= token < manifest.target.vocab_size]
    if ends:
        return f"vocabulary.eos_token_ids: expected ids below {manifest.target.vocab_size}, found {ends[0]}"
    for where, engines in (("engines", manifest.engines), ("heads", manifest.heads)):
        for name, engine in engines.items():
            problem = _engine_problem(engine, manifest.files)
            if problem:
                return f"{where}.{name}.{problem}"
    return _drafter_problem(manifest)


def _drafter_problem(manifest: Manifest) -> str | None:
    """Say which drafter lacks something, or was made for another target."""
    for name, drafter in manifest.drafters.items():
        problem = drafter_problem(
            drafter, engines=manifest.engines, heads=manifest.heads, files=manifest.files,
            vocabulary=manifest.vocabulary.fingerprint, has_exit=manifest.target.exit is not None,
        )  # fmt: skip
        if problem:
            return f"drafters.{name}{problem}"
    return None


def _engine_problem(engine: EngineSpec, files: Mapping[str, FileEntry]) -> str | None:
    """Say which file of an engine is not listed, or which of its sizes contradict each other."""
    if engine.exit is not None and (problem := exit_problem(engine.exit, files=files, inputs=engine.inputs)):
        return f"exit.{problem}"
    return _sizes_problem(engine, files) or _plan_problem(engine)


def _sizes_problem(engine: EngineSpec, files: Mapping[str, FileEntry]) -> str | None:
    for key in ("file", "weights", "reference"):
        if getattr(engine, key) not in files:
            return f"{key}: {getattr(engine, key)!r} is not among the listed files"
    widths = list(engine.verify_widths)
    if not widths or widths[0] < 1 or widths != sorted(set(widths)):
        return f"verify_widths: expected rising numbers from 1 on, found {widths}"
    if engine.prefill_width < 1 or engine.capacity < 1:
        return f"capacity: expected positive sizes, found {engine.capacity} with prefill_width {engine.prefill_width}"
    if engine.output == "top-k" and TOP_LOGSUMEXP not in {tensor.name for tensor in engine.outputs}:
        return (
            f"outputs: expected {TOP_LOGSUMEXP} beside {TOP_IDS}, found none, as older versions wrote: export it again"
        )
    slots = engine.capacity + max(engine.prefill_width, *widths)
    if engine.slots != slots:
        return f"slots: expected {slots}, capacity and widest call together, found {engine.slots}"
    for spec in (*engine.inputs, *engine.outputs):
        kv = spec.name.startswith(("past_", "present_"))
        size = engine.slots if kv else engine.vocab_size
        if (kv or spec.name == "logits") and spec.shape[2:3] != (size,):
            return f"{spec.name}: expected {size} in dimension 2 of its shape, found {list(spec.shape)}"
        if kv and not all(isinstance(dim, int) and dim > 0 for dim in spec.shape):
            return f"{spec.name}: expected a shape of fixed sizes, found {list(spec.shape)}"
    return None


def _plan_problem(engine: EngineSpec) -> str | None:
    if engine.plan is None:
        return None
    if engine.dialect != "tensorrt":
        return f"plan: expected the dialect tensorrt, found {engine.dialect}"
    if engine.plan.output != engine.output:
        return f"plan.output: expected {engine.output}, as the engine's outputs say, found {engine.plan.output}"
    problem = plan_problem(
        engine.plan, prefill_width=engine.prefill_width, verify_widths=engine.verify_widths, inputs=engine.inputs
    )
    return None if problem is None else f"plan.{problem}"
