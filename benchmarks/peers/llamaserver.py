"""llama.cpp's own server, built from the sources in llama-cpp-python's sdist: plain, n-gram and draft decoding in C++.

Run as a program in the peer's environment it builds the server there.
"""

import atexit
import json
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.protocol import DRAFT, NGRAM, Generation, Job, Peer, UnavailableError

_SOURCE = "llama-cpp-python==0.3.36"
_HOME = Path(sys.prefix) / "llama.cpp"
_SERVER = _HOME / "build" / "bin" / "llama-server"
_NGRAM = 3  # length of the n-gram that is looked up, the most recent match
_START_S = 60.0
_OFF = ("LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI")


class Runner(Peer):
    """Starts a server per mode and k, which are options of its command line; the weights are mapped once for all."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._servers: dict[tuple[str, int], int] = {}  # ports

    def open(self) -> None:
        """Servers are started when they are first asked."""

    def generate(self, ids: Sequence[int], n: int, mode: str, k: int) -> Generation:
        """Take the server's own times, which begin after the prompt and its token: no HTTP in them."""
        if (mode, k) not in self._servers:
            self._servers[mode, k] = self._start(mode, k)
        request = {
            "prompt": list(ids), "n_predict": n, "temperature": 0, "top_k": 1, "samplers": ["top_k"],
            "ignore_eos": True, "return_tokens": True, "cache_prompt": False,
        }  # fmt: skip
        answer = _post(self._servers[mode, k], request)
        times = answer["timings"]
        return Generation(
            ids=answer["tokens"], num_timed=times["predicted_n"] - 1, decode_s=times["predicted_ms"] / 1e3,
            prompt_s=times["prompt_ms"] / 1e3,
        )  # fmt: skip

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """The server gives none; the Python binding to the same library does."""
        raise UnavailableError("the server gives no logits: see llamacpp, the same library and file")

    def _start(self, mode: str, k: int) -> int:
        """Start a server, which ends with this process; return its port."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        threads = str(self._job.threads)
        command = [str(_SERVER), "-m", str(self._job.target.gguf), "--port", str(port), "-t", threads, "-tb", threads]
        command += ["-c", str(self._job.context), "-np", "1", "--cache-ram", "0", "--no-warmup"]
        if mode == NGRAM:
            command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(_NGRAM)]
            command += ["--spec-ngram-simple-size-m", str(k)]
        elif mode == DRAFT and self._job.draft:
            command += ["--spec-type", "draft-simple", "-md", str(self._job.draft.gguf), "--spec-draft-n-max", str(k)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr)
        atexit.register(_end, process)
        end = time.monotonic() + _START_S
        while process.poll() is None and time.monotonic() < end:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
            else:
                return port
        raise UnavailableError("the server did not start")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def build() -> None:
    """Fetch the sdist and compile the server, for this processor."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest"]
    subprocess.run([*pip, str(_HOME), _SOURCE], check=True)
    (archive,) = _HOME.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(_HOME, filter="data")
    source = _HOME / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    tools = Path(sys.executable).parent
    command = [str(tools / "cmake"), "-S", str(source), "-B", str(_HOME / "build"), "-G", "Ninja"]
    command += [f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON"]
    subprocess.run([*command, *(f"-D{name}=OFF" for name in _OFF)], check=True)
    subprocess.run([str(tools / "cmake"), "--build", str(_HOME / "build"), "--target", "llama-server"], check=True)


def _post(port: int, request: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(request).encode()
    url = f"http://127.0.0.1:{port}/completion"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as reply:
            answer: dict[str, Any] = json.load(reply)
    except urllib.error.HTTPError as error:
        raise UnavailableError(error.read().decode("utf-8", "replace")) from None
    return answer


if __name__ == "__main__":
    build()
