"""Fixtures: tiny exported models for every run, the real default model for the slow tests."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported
os.environ.setdefault("TQDM_DISABLE", "1")
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # threads of torch that share a core wait for each other
    cores = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))

import browser
import specrt
import tiny
from tiny import export_tiny


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--qwen", action="store_true", help="run the tests of the Qwen2.5-Coder pair (fetches 1.6 GB once)"
    )
    parser.addoption("--browser", action="store_true", help="fail where there is no Chromium, instead of skipping")
    parser.addoption("--artifacts", type=Path, help="keep the real models' artifacts in this folder and reuse them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("numprocesses", None):  # files that export real models first, so that no process ends alone
        slow = {item.path for item in items if "real_folder" in getattr(item, "fixturenames", ())}
        items.sort(key=lambda item: item.path not in slow)
    if browser.find() is None and not config.getoption("--browser"):
        skip = pytest.mark.skip(reason=f"no browser: install one of {', '.join(browser.NAMES)}")
        for item in items:
            if "browser" in item.keywords:
                item.add_marker(skip)
    if not config.getoption("--qwen"):
        skip = pytest.mark.skip(reason="needs 1.6 GB of models: run with --qwen")
        for item in items:
            if "qwen" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """Let garbage collections pass over what was there before: torch alone makes each of them take a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight Llama as a transformers directory."""
    return tiny.make_model("llama", tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def tiny_artifact(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That Llama as an artifact at fp32, with itself at int4 as draft."""
    return export_tiny(tiny_source, tmp_path_factory.mktemp("artifact") / "tiny", draft=str(tiny_source))


@pytest.fixture(scope="session")
def trees_artifact(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That Llama at fp32 with trees and a random-weight head."""
    folder = tmp_path_factory.mktemp("trees")
    head = tiny.make_head(tiny_source, folder / "head.safetensors", "eagle", d2t=False)
    profile = tiny.profile(trees=True, draft_precision="fp32")
    return export_tiny(tiny_source, folder / "tiny", draft=None, heads=(head,), profile=profile)


@pytest.fixture(scope="session")
def medusa_artifact(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That Llama as an artifact that takes trees, with Medusa heads that are right now and then."""
    folder = tmp_path_factory.mktemp("medusa")
    head = tiny.make_medusa(tiny_source, folder / "head.safetensors", matrices=0, scale=0.02)
    profile = tiny.profile(draft_precision="fp32", trees=True)
    return export_tiny(tiny_source, folder / "tiny", draft=None, heads=(head,), profile=profile)


@pytest.fixture(scope="session")
def exit_artifact(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That Llama with an early exit after the first of its two layers, and trees, and both kinds of heads."""
    folder = tmp_path_factory.mktemp("exit")
    heads = (
        tiny.make_head(tiny_source, folder / "eagle.safetensors", "eagle", d2t=False),
        tiny.make_medusa(tiny_source, folder / "medusa.safetensors", matrices=0, scale=0.02),
    )
    profile = tiny.profile(draft_precision="fp32", trees=True)
    return export_tiny(tiny_source, folder / "tiny", draft=None, heads=heads, profile=profile, early_exit=1)


@pytest.fixture(scope="session")
def tensorrt_artifact(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That Llama in the TensorRT dialect at fp32, with itself as draft."""
    profile = tiny.profile(dialect="tensorrt", draft_precision="fp32")
    return export_tiny(
        tiny_source, tmp_path_factory.mktemp("tensorrt") / "tiny", draft=str(tiny_source), profile=profile
    )


@pytest.fixture(scope="session")
def half_artifact(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That Llama as an artifact at fp16, which ONNX Runtime has CUDA kernels for, with itself as draft."""
    profile = tiny.profile(precision="fp16", draft_precision="fp16")
    return export_tiny(tiny_source, tmp_path_factory.mktemp("half") / "tiny", draft=str(tiny_source), profile=profile)


@pytest.fixture(scope="session")
def real_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where artifacts of real models are, or will be exported to."""
    folder: Path = request.config.getoption("--artifacts") or tmp_path_factory.mktemp("artifacts")
    return folder


@pytest.fixture(scope="session")
def machine_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where measurements of this run are kept."""
    return tmp_path_factory.mktemp("machine")


@pytest.fixture
def tiny_model(tiny_artifact: Path, machine_cache: Path) -> Iterator[specrt.LanguageModel]:
    """The tiny artifact, loaded."""
    with specrt.load(tiny_artifact, cache_dir=machine_cache) as model:
        yield model


@pytest.fixture
def training_settings() -> Iterator[None]:
    """Put back what a training sets: number of threads, signal handler."""
    import torch

    before, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    yield
    torch.set_num_threads(before)
    signal.signal(signal.SIGTERM, handler)
