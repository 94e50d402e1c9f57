"""The peers: what they need installed, which weights they run at, which modes one process serves."""

from dataclasses import dataclass

from benchmarks.peers.protocol import AUTO, DRAFT, MODES, PLAIN_ONE

_TORCH = ("torch==2.13.0", "transformers==5.24.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEntry:
    """One peer. `requirements` are installed by one pip call each into an environment of its own.

    variants: names of its weights, `/f32` behind it for the same weights with everything computed in fp32. separate:
    modes that need a process of their own, because they are chosen when the model is loaded. more: modes that no other
    peer has. compiled: its module, run as a program, builds the rest.
    """

    name: str
    module: str
    requirements: tuple[str, ...]
    variants: tuple[str, ...]
    separate: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    needs_gguf: bool = False
    compiled: bool = False
    variables: tuple[tuple[str, str], ...] = ()  # of the installation's environment


PEERS = {
    entry.name: entry
    for entry in (
        PeerEntry(
            name="specrt", module="specrt_runner", requirements=(), variants=("fp32", "int8", "int4"),
            more=(PLAIN_ONE, AUTO),
        ),
        PeerEntry(
            name="genai", module="genai", variants=("fp32", "int8", "int4", "int4-asymmetric"), separate=(DRAFT,),
            requirements=("onnxruntime-genai==0.18.0", "onnx-ir==1.1.0", *_TORCH),
        ),
        PeerEntry(
            name="openvino", module="openvino", variants=("fp16/f32", "int8", "int4", "int4/f32"), separate=MODES,
            requirements=("openvino-genai==2026.4.1.0",), needs_gguf=True,
        ),
        PeerEntry(
            name="llamacpp", module="llamacpp", variants=("fp32", "int8", "int4"), separate=MODES,
            requirements=("llama-cpp-python==0.3.36",), needs_gguf=True,
            variables=(("CMAKE_ARGS", "-DGGML_NATIVE=ON"),),
        ),
        PeerEntry(
            name="llamaserver", module="llamaserver", variants=("fp32", "int8", "int4"), compiled=True,
            requirements=("cmake==4.4.5", "ninja==1.13.2", "numpy==2.4.6"), needs_gguf=True,
        ),
        PeerEntry(
            name="hf", module="hf", variants=("fp32",), requirements=(*_TORCH, "accelerate==1.15.0"),
        ),
    )
}  # fmt: skip
