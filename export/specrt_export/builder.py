"""TensorRT's own parser and builder: from a linted graph to a plan. TensorRT-RTX builds without a GPU.

Both packages have the same interface here; `tensorrt` builds for the GPU of this machine, `tensorrt-rtx` for any of the
compute capabilities that are named.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specrt_export.errors import ExportError
from specrt_export.progress import Phases
from specrt_profiles.extras import require
from specrt_profiles.manifest import EngineSpec
from specrt_profiles.plan import Alias, BuilderName, PlanShape, kv_aliases
from specrt_profiles.tensors import ROWS, WIDTH, TensorSpec

_MODULES: Mapping[BuilderName, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64"}
_DEAF = "new logger is ignored"  # while another object of the package lives, whose logger hears everything
_UNREAD = "Unused Input"  # the warning about an input that nothing is computed from


class PlanError(ExportError):
    """A plan that cannot be built, with the builder's reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How to build: `compute_capabilities` like "8.9" (TensorRT-RTX only), scratch memory in MiB, a timing cache."""

    builder: BuilderName
    compute_capabilities: tuple[str, ...] = ()
    workspace_mib: int | None = None
    timing_cache: Path | None = None


class Builder:
    """One of the two packages, opened; raises `PlanError` or `MissingExtraError` when it cannot be used here."""

    def __init__(self, options: BuildOptions) -> None:
        self._options = options
        self._trt = _package(options.builder)
        self.version = str(self._trt.__version__)
        self._name = f"{options.builder} {self.version}"
        self._log: Any = _logger(self._trt)
        self._capabilities = self._known_capabilities()
        try:
            self._builder = self._trt.Builder(self._log)
        except (TypeError, RuntimeError) as error:  # TensorRT's factory gives nothing when there is no driver
            raise PlanError(
                f"{options.builder} cannot start here ({self._log.first() or str(error).splitlines()[0]}): it needs an "
                "NVIDIA driver and a GPU; --builder tensorrt-rtx builds without"
            ) from None
        if any(_DEAF in text for text in self._log.warnings):
            raise PlanError(f"{self._name}: something else in this process uses it: build in a process of its own")

    def build(
        self, spec: EngineSpec, graph: Path, shapes: Sequence[PlanShape], on_fraction: Callable[[float], None]
    ) -> Any:
        """Return the plan of a graph as an object with the buffer protocol, one optimization profile per shape.

        `on_fraction` is told the share that is done. Raises `PlanError` when the graph is not taken as it is written,
        when its tensors are not those of `spec`, or when a cache would not be updated in place.
        """
        monitor = _monitor(self._trt, on_fraction)
        return _in_thread(partial(self._build, spec, graph, shapes, monitor), monitor)

    def _build(self, spec: EngineSpec, graph: Path, shapes: Sequence[PlanShape], monitor: Any) -> Any:
        network = self._builder.create_network(1 << int(self._trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self._parse(network, graph)
        self._check_tensors(network, spec, graph)
        if spec.precision == "fp32":
            self._decompose_attention(network)
        config = self._config(network, shapes)
        config.progress_monitor = monitor
        plan = self._builder.build_serialized_network(network, config)
        if plan is None and monitor.error is None:
            raise PlanError(f"{graph}: {self._name}: {self._log.first() or 'no plan'}")
        if dropped := [text for text in self._log.warnings if _UNREAD in text]:
            raise PlanError(f"{graph}: {self._name} would ignore an input: {_line(dropped[0])}")
        self._save_timing_cache(config)
        return plan

    def _parse(self, network: Any, graph: Path) -> None:
        parser = self._trt.OnnxParser(network, self._log)
        if not parser.parse_from_file(str(graph)):
            errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
            raise PlanError(f"{graph}: {self._name} does not take it: {_line(*errors)}")

    def _check_tensors(self, network: Any, spec: EngineSpec, graph: Path) -> None:
        """Compare names, types, shapes and aliases with the contract."""
        for what, count, get, specs in (
            ("input", network.num_inputs, network.get_input, spec.inputs),
            ("output", network.num_outputs, network.get_output, spec.outputs),
        ):
            found, wanted = [_described(get(i)) for i in range(count)], [_expected(tensor) for tensor in specs]
            for theirs, ours in zip(found, wanted, strict=False):
                if theirs != ours:
                    raise PlanError(f"{graph}: {what}: expected {ours}, as in the manifest, found {theirs}")
            if len(found) != len(wanted):
                raise PlanError(f"{graph}: expected {len(wanted)} {what}s, as in the manifest, found {len(found)}")
        found_aliases = self._aliases(network)
        if missing := [alias for alias in kv_aliases(spec.inputs) if alias not in found_aliases]:
            raise PlanError(f"{graph}: expected {missing[0].output} to update {missing[0].input} in place, it does not")

    def _aliases(self, network: Any) -> list[Alias]:
        layers = (network.get_layer(i) for i in range(network.num_layers))
        updates = [layer for layer in layers if layer.type == self._trt.LayerType.KV_CACHE_UPDATE]
        return [Alias(output=layer.get_output(0).name, input=layer.get_input(0).name) for layer in updates]

    def _decompose_attention(self, network: Any) -> None:
        """Let attention be built from simpler kernels: there is none for it in fp32."""
        for i in range(network.num_layers):
            layer = network.get_layer(i)
            if layer.type == self._trt.LayerType.ATTENTION_OUTPUT:
                layer.__class__ = self._trt.IAttentionOutputLayer
                layer.attention.decomposable = True

    def _config(self, network: Any, shapes: Sequence[PlanShape]) -> Any:
        config = self._builder.create_builder_config()
        if self._options.workspace_mib is not None:
            config.set_memory_pool_limit(self._trt.MemoryPoolType.WORKSPACE, self._options.workspace_mib << 20)
        if self._capabilities:
            config.num_compute_capabilities = len(self._capabilities)
            for place, capability in enumerate(self._capabilities):
                if not config.set_compute_capability(capability, place):
                    raise PlanError(f"{self._name}: {self._log.first()}")
        self._load_timing_cache(config)
        for shape in shapes:
            self._add_shape(network, config, shape)
        return config

    def _add_shape(self, network: Any, config: Any, shape: PlanShape) -> None:
        made = self._builder.create_optimization_profile()
        for i in range(network.num_inputs):
            tensor = network.get_input(i)
            if -1 in tuple(tensor.shape):
                free = shape.rows if tensor.name == "logits_indices" else shape.width
                fixed = tuple(free if size == -1 else size for size in tensor.shape)
                made.set_shape(tensor.name, fixed, fixed, fixed)
        if config.add_optimization_profile(made) < 0:
            raise PlanError(f"{shape.name} {shape.width}: {self._name}: {self._log.first()}")

    def _known_capabilities(self) -> list[Any]:
        """Return the package's names of the compute capabilities asked for."""
        wanted = self._options.compute_capabilities
        if not wanted:
            return []
        if self._options.builder == "tensorrt":
            raise PlanError("--compute-capability needs --builder tensorrt-rtx: tensorrt builds for this machine's GPU")
        kinds = self._trt.ComputeCapability
        known = {f"{int(name[2:]) // 10}.{int(name[2:]) % 10}": name for name in dir(kinds) if name.startswith("SM")}
        for text in wanted:
            if text not in known:
                names = ", ".join(sorted(known, key=lambda name: int(known[name][2:])))
                raise PlanError(f"--compute-capability: expected {names}, found {text}")
        return [getattr(kinds, known[text]) for text in wanted]

    def _load_timing_cache(self, config: Any) -> None:
        path = self._options.timing_cache
        if path is None or self._options.builder == "tensorrt-rtx":
            return
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise PlanError(f"{path}: the timing cache cannot be read: {error.strerror}") from None
        if not config.set_timing_cache(config.create_timing_cache(content), False):
            raise PlanError(f"{path}: not a timing cache of this TensorRT and GPU: delete it: {self._log.first()}")

    def _save_timing_cache(self, config: Any) -> None:
        path = self._options.timing_cache
        if path is None or self._options.builder == "tensorrt-rtx":
            return
        new = path.with_name(f".{path.name}.new")
        try:
            new.write_bytes(memoryview(config.get_timing_cache().serialize()))
            new.replace(path)
        except OSError as error:
            raise PlanError(f"{path}: the timing cache cannot be written: {error.strerror}") from None


def _package(name: BuilderName) -> Any:
    require(name, _MODULES[name])
    try:
        if name == "tensorrt":
            import tensorrt as trt
        else:
            import tensorrt_rtx as trt
    except (ImportError, OSError) as error:
        raise PlanError(f"{_MODULES[name]} cannot be imported: {_line(str(error))}: install it again") from None
    return trt


def _logger(trt: Any) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]
        """Keeps warnings and errors."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            if int(severity) <= int(trt.ILogger.Severity.ERROR):
                self.errors.append(text)
            elif int(severity) == int(trt.ILogger.Severity.WARNING):
                self.warnings.append(text)

        def first(self) -> str:
            return _line(*self.errors[:1])

    return Log()


def _in_thread(build: Callable[[], Any], monitor: Any) -> Any:
    """Return what `build` gives; an interrupt stops it at its next step.

    Signals come to the main thread: there, the builder's callbacks would swallow what a handler raises.
    """
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(build)
        try:
            plan = future.result()
        except BaseException:
            monitor.stopped = True
            raise
    error, monitor.error = monitor.error, None  # whose traceback would keep the builder, and the builder the monitor
    if error is not None:
        raise error
    return plan


def _monitor(trt: Any, on_fraction: Callable[[float], None]) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Hands on the share that is done; stops the build when it is told to or when that fails."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.stopped = False
            self.error: Exception | None = None
            self._phases = Phases()

        def phase_start(self, name: str, parent: str | None, num_steps: int) -> None:
            self._phases.start(name, parent, num_steps)

        def step_complete(self, name: str, step: int) -> bool:
            try:
                on_fraction(self._phases.step(name, step))
            except Exception as error:  # what is raised through the builder is lost
                self.error = error
            return not self.stopped and self.error is None

        def phase_finish(self, name: str) -> None:
            self._phases.finish(name)

    return Monitor()


def _described(tensor: Any) -> tuple[str, str, tuple[int, ...]]:
    return tensor.name, _TYPES.get(tensor.dtype.name, tensor.dtype.name.lower()), tuple(tensor.shape)


def _expected(spec: TensorSpec) -> tuple[str, str, tuple[int, ...]]:
    return spec.name, spec.dtype, tuple(-1 if size in (WIDTH, ROWS) else int(size) for size in spec.shape)


def _line(*texts: str) -> str:
    """Return what the builder said as one line."""
    return " ".join(" ".join(texts[:1]).split())[:400]
