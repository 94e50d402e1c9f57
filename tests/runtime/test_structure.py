"""Layering, public names, docstrings and what the wheel holds."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

import pytest

import specrt

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "specrt": ROOT / "runtime" / "specrt",
    "specrt_export": ROOT / "export" / "specrt_export",
    "specrt_profiles": ROOT / "profiles" / "specrt_profiles",
}
FILES = [(package, path) for package, folder in PACKAGES.items() for path in sorted(folder.rglob("*.py"))]
INTERNAL = {
    "specrt": {"specrt", "specrt_profiles"},
    "specrt_export": {"specrt_export", "specrt_profiles"},
    "specrt_profiles": {"specrt_profiles"},
}
EXPORT_ONLY = {
    "accelerate", "gguf", "huggingface_hub", "ml_dtypes", "onnx", "onnx_ir", "onnxscript", "optimum", "safetensors",
    "torch", "transformers",
}  # fmt: skip
THIRD_PARTY = {
    "specrt": {
        "*": {"numpy"},
        "cli*.py": {"click"},
        "text.py": {"tokenizers", "jinja2"},
        "engine_ort*.py": {"onnxruntime"},
        "engine_trt.py": {"tensorrt", "tensorrt_rtx"},
        "cuda.py": {"cuda"},
        "metrics.py": {"prometheus_client"},
        "*_plot.py": {"matplotlib"},
    },
    "specrt_export": {
        "*": {"click", "numpy", "tokenizers", "onnxruntime", *EXPORT_ONLY},
        "builder.py": {"tensorrt", "tensorrt_rtx"},
    },
    "specrt_profiles": {"*": {"numpy"}},
}
HEAVY = (
    "torch", "onnx", "transformers", "onnxruntime", "tensorrt", "tensorrt_rtx", "cuda", "tokenizers", "jinja2", "click",
    "matplotlib", "prometheus_client", "specrt_export",
)  # fmt: skip


def imports(path: Path) -> Iterator[str]:
    """Yield the top-level name of every import in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            assert name not in ("import_module", "__import__"), f"{path}:{node.lineno}: hides what it imports"


def forbidden(package: str, path: Path, names: set[str]) -> set[str]:
    """Return the imports that a file of a package may not have."""
    allowed = {name for pattern, names in THIRD_PARTY[package].items() if fnmatch(path.name, pattern) for name in names}
    return names - INTERNAL[package] - allowed - set(sys.stdlib_module_names)


def test_all_three_packages_are_found() -> None:
    counts = {package: sum(owner == package for owner, _ in FILES) for package in PACKAGES}
    assert counts["specrt"] >= 20
    assert counts["specrt_export"] >= 10
    assert counts["specrt_profiles"] >= 8


@pytest.mark.parametrize(("package", "path"), FILES, ids=lambda value: getattr(value, "stem", value))
def test_imports_stay_within_the_layers(package: str, path: Path) -> None:
    assert forbidden(package, path, set(imports(path))) == set()


@pytest.mark.parametrize(
    ("package", "file", "name"),
    [
        ("specrt", "loop.py", "specrt_export"),
        ("specrt_export", "artifact.py", "specrt"),
        ("specrt_profiles", "manifest.py", "specrt"),
        ("specrt", "loop.py", "torch"),
        ("specrt", "loop.py", "onnxruntime"),
        ("specrt", "language_model.py", "tokenizers"),
        ("specrt", "sampling.py", "scipy"),
        ("specrt_profiles", "manifest.py", "onnx"),
    ],
)
def test_a_wrong_import_would_be_found(package: str, file: str, name: str) -> None:
    assert forbidden(package, PACKAGES[package] / file, {name, "json"}) == {name}


def run_python(code: str) -> str:
    """Run code in a fresh interpreter; return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["specrt", "specrt_profiles.manifest"])
def test_importing_brings_in_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    assert run_python(code) == ""


def test_the_command_line_brings_in_nothing_heavy_but_click() -> None:
    code = f"import sys, specrt.cli; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    assert run_python(code) == "click"


def test_the_public_names() -> None:
    assert specrt.__all__ == [
        "BusyError",
        "EngineError",
        "LanguageModel",
        "ManifestError",
        "MissingExtraError",
        "RequestError",
        "Result",
        "SamplingParams",
        "SpecRTError",
        "Statistics",
        "Stream",
        "TextError",
        "Token",
        "TokenLogprob",
        "load",
    ]
    assert all(hasattr(specrt, name) for name in specrt.__all__)
    assert specrt.__version__ == version("specrt")
    assert not hasattr(specrt, "anything")


def public(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield every public module, class, function and method, by path; private classes hide what is in them."""
    yield prefix, node
    for child in ast.iter_child_nodes(node):
        inside = isinstance(node, ast.FunctionDef)
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_") and not inside:
            yield from public(child, f"{prefix}.{child.name}")


@pytest.mark.parametrize(("package", "path"), FILES, ids=lambda value: getattr(value, "stem", value))
def test_everything_public_has_a_docstring(package: str, path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    found = [(name, ast.get_docstring(node)) for name, node in public(tree, path.stem)]  # type: ignore[arg-type]
    if path.name == "__init__.py" and not path.read_text("utf-8").strip():
        return
    assert [name for name, docstring in found if not docstring] == []


def test_a_source_root_holds_one_package_and_is_none_itself() -> None:
    for folder in PACKAGES.values():
        assert not (folder.parent / "__init__.py").exists()
        assert [path.name for path in folder.parent.iterdir() if (path / "__init__.py").is_file()] == [folder.name]


def test_the_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built with the tools that are installed."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_three_packages_and_their_data(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == expected
    assert {Path(name).suffix for name in names} >= {".py", ".toml", ".jsonl"}
    assert {"specrt/data/prompts.jsonl", "specrt_profiles/builtin/cpu.toml", "specrt_export/catalogue.toml"} <= names


def test_the_wheel_requires_little_without_extras(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    required = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert sorted(line.split(">")[0].strip() for line in required) == ["click", "jinja2", "numpy", "tokenizers"]
    assert {"cpu", "export"} <= set(metadata.get_all("Provides-Extra") or [])


def test_the_wheel_brings_the_command_and_its_plugins(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    text = wheel.read(name).decode()
    assert "specrt = specrt.cli:main" in text
    assert "export = specrt_export.cli:export_command" in text
    assert any(name.endswith("LICENSE") for name in wheel.namelist())


def test_every_import_of_a_package_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    base = {line.partition(">")[0] for line in project["dependencies"]}
    runtime = {name for package, path in FILES if package != "specrt_export" for name in imports(path)}
    internal = set(PACKAGES) | set(sys.stdlib_module_names)
    extras = {"onnxruntime", "matplotlib", "tensorrt", "tensorrt_rtx", "cuda", "prometheus_client"}
    assert runtime - internal - extras == base
