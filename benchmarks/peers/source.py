"""What every peer starts from: the same weights in the forms that they read. Runs in SpecRT's own environment.

WORK/source/              transformers directory: fp32 safetensors, tokenizer, chat template, vocabulary.json
WORK/gguf/int4.gguf       the GGUF file as shipped, if the model is one of about 4 bits
WORK/gguf/int8.gguf       its matrices as Q8_0, from the values they have in the file
WORK/gguf/fp32.gguf       its matrices as F32, likewise; fp16.gguf as F16, which rounds them to 11 bits
WORK/reference.npz        the source's logits of the fixed texts, and their token ids

The driver calls it as a program of its own, so that no torch threads live beside the measurements:
python -m benchmarks.peers.source MODEL WORK [TEXTS.json]
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

_BLOCK = 32  # values per block of Q8_0
_INT4_BITS = 6.5  # per parameter and at most: 4-bit files keep some of their matrices, scales and offsets at more


def main(model: str, work: Path, texts: Path | None) -> None:
    """Make what is missing in `work`; texts: a JSON list of token id lists whose logits the source is to give."""
    from specrt_export.checkpoint import resolve
    from specrt_export.cli import default_cache_dir

    work.mkdir(parents=True, exist_ok=True)
    if not (work / "source" / "vocabulary.json").is_file():
        checkpoint = resolve(model, revision=None, cache_dir=default_cache_dir(), on_bytes=lambda _: None)
        if checkpoint.gguf_file:
            path = checkpoint.directory / checkpoint.gguf_file
            bits = 8 * path.stat().st_size / checkpoint.num_parameters
            _write_gguf_forms(path, work / "gguf", is_int4=bits < _INT4_BITS)
        _write_source(checkpoint, work / "source")  # last, as the mark that all is there
    if texts is not None:
        _write_reference(work, json.loads(texts.read_text()))


def _write_source(checkpoint: Any, folder: Path) -> None:
    """Save the model from its configuration and values alone: one loaded from GGUF counts as quantised otherwise."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from specrt_export.tokenizer import load_tokenizer, save_tokenizer, vocabulary_of

    loaded = AutoModelForCausalLM.from_pretrained(
        str(checkpoint.directory), dtype="float32", **checkpoint.from_pretrained
    )
    settings = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    with torch.device("meta"):  # the values are there once already
        clean = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    clean.load_state_dict(loaded.state_dict(), assign=True)
    clean.tie_weights()
    eos, bos = loaded.config.eos_token_id, loaded.config.bos_token_id
    clean.generation_config = GenerationConfig(eos_token_id=eos, bos_token_id=bos)
    clean.save_pretrained(folder)
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    vocabulary = vocabulary_of(tokenizer, clean.generation_config, num_rows=clean.config.vocab_size)
    (folder / "vocabulary.json").write_text(json.dumps(asdict(vocabulary)))


def _write_gguf_forms(path: Path, folder: Path, *, is_int4: bool) -> None:
    folder.mkdir(exist_ok=True)
    if is_int4:
        shipped = folder / "int4.gguf"
        shipped.unlink(missing_ok=True)
        shipped.symlink_to(path.resolve())
    for name, form in (("int8", "Q8_0"), ("fp32", "F32"), ("fp16", "F16")):
        rewrite_gguf(path, folder / f"{name}.gguf", form)


def rewrite_gguf(path: Path, out: Path, form: str) -> None:
    """Copy a GGUF file with its matrices as `form` (Q8_0, F32 or F16), vectors as F32, everything else as it is."""
    import gguf

    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if form == "F32" else f"MOSTLY_{form}"])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        is_matrix = values.ndim == 2 and values.shape[-1] % _BLOCK == 0
        kind = gguf.GGMLQuantizationType[form if is_matrix else "F32"]
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_reference(work: Path, texts: list[list[int]]) -> None:
    """Keep the source's logits float32 [n, V] per text; done again only when the texts are others."""
    import torch
    from transformers import AutoModelForCausalLM

    path = work / "reference.npz"
    if path.is_file():
        with np.load(path) as file:
            if json.loads(str(file["texts"])) == texts:
                return
    model = AutoModelForCausalLM.from_pretrained(work / "source", dtype="float32").eval()
    rows = {}
    with torch.no_grad():
        for number, ids in enumerate(texts):
            rows[f"logits.{number}"] = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    np.savez(path, texts=json.dumps(texts), **rows)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
