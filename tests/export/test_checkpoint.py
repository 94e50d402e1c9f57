"""Finding a model, and refusing the ones that cannot be exported, with the reason and before any work."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny
from specrt_export import artifact
from specrt_export.checkpoint import Checkpoint, resolve
from specrt_export.errors import CheckpointError, ExportError, UnsupportedModelError

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 384,
}


def find(model: object) -> Checkpoint:
    return resolve(str(model), revision=None, cache_dir=Path("/nowhere"), on_bytes=lambda _: None)


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let a test fail as soon as an engine is built."""

    def build(*_: object) -> None:
        pytest.fail("work began")

    if "works" not in request.fixturenames:
        monkeypatch.setattr(artifact, "build_engine", build)


@pytest.fixture
def works() -> None:
    """Asked for by tests that do build an engine."""


def refusal(source: object, out: Path, error: type[ExportError], **request: Any) -> str:
    """Return the one line that an export is refused with, and see that it leaves nothing."""
    with pytest.raises(error) as caught:
        tiny.export_tiny(Path(str(source)), out, **request)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert not list(out.parent.glob(f"*{out.name}*"))
    return str(caught.value)


def config(name: str, **settings: object) -> Any:
    import transformers

    return getattr(transformers, name)(**settings)


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        (
            "T5Config",
            {"d_model": 32, "architectures": ["T5ForConditionalGeneration"]},
            "T5ForConditionalGeneration: expected a decoder-only text model, found an encoder-decoder model",
        ),
        ("T5Config", {"d_model": 32}, "t5: expected a decoder-only text model"),
        ("BartConfig", {"architectures": ["BartForCausalLM"]}, "BartForCausalLM: expected a decoder-only text model"),
        ("BertConfig", {"architectures": ["BertModel"]}, "found the task feature-extraction"),
        ("LlamaConfig", {"architectures": ["NoSuchForCausalLM"]}, "NoSuchForCausalLM: expected a decoder-only"),
        ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 1}, "keep state that cannot be rolled back"),
        ("RwkvConfig", {"hidden_size": 32}, "its layers (recurrent) keep state that cannot be rolled back"),
        ("JambaConfig", {}, "its layers (linear_attention) keep state that cannot be rolled back"),
        ("BloomConfig", {"hidden_size": 64, "n_head": 4}, "(no attention interface)"),
        ("LlamaConfig", {**SMALL, "num_attention_heads": 16}, "its head size 4 is not a multiple of 8"),
        ("LlamaConfig", {**SMALL, "num_key_value_heads": 3}, "its 4 query heads are not a multiple of its 3 KV heads"),
        (
            "LlamaConfig",
            {**SMALL, "max_position_embeddings": 64},
            "it knows 64 positions, fewer than the capacity 128: choose --capacity 64 or less",
        ),
        ("GPT2Config", {"n_embd": 64, "n_head": 4, "n_positions": 100}, "choose --capacity 100 or less"),
        ("LlamaConfig", {**SMALL, "num_hidden_layers": 0}, "expected positive sizes, found DecoderDims(num_layers=0"),
        ("Llama4Config", {"text_config": {"num_local_experts": 1}}, "its configuration has no single size"),
        ("Llama4TextConfig", {}, "its layers (chunked_attention) are neither full nor sliding attention"),
        ("MixtralConfig", {}, "mixture of experts"),
        ("Qwen3MoeConfig", {}, "mixture of experts"),
        ("DbrxConfig", {}, "mixture of experts"),
        ("MiniCPM3Config", {}, "multi-head latent attention"),
        ("BertConfig", {**SMALL, "architectures": ["BertLMHeadModel"]}, "its attention is not causal"),
    ],
)
def test_a_model_that_cannot_be_exported_is_refused_with_the_reason(
    tmp_path: Path, name: str, settings: dict[str, object], text: str
) -> None:
    source = tiny.make_shell(tmp_path / "model", config(name, **settings))
    assert text in refusal(source, tmp_path / "out", UnsupportedModelError)


def test_a_draft_is_judged_like_a_target(tiny_source: Path, tmp_path: Path) -> None:
    draft = tiny.make_shell(tmp_path / "draft", config("MambaConfig", hidden_size=32, num_hidden_layers=1))
    text = refusal(tiny_source, tmp_path / "out", UnsupportedModelError, draft=str(draft))
    assert "keep state that cannot be rolled back" in text


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        ({"model_type": "odd", "auto_map": {"AutoConfig": "a.B"}}, UnsupportedModelError, "(trust_remote_code), which"),
        ({"model_type": "odd"}, CheckpointError, "transformers cannot read its configuration"),
        ({"hidden_size": 3}, CheckpointError, "Should have a `model_type` key"),
        ({"model_type": "llama", "hidden_size": "big"}, CheckpointError, "expected int, got str"),
        ({"model_type": "llama", "num_attention_heads": 0}, CheckpointError, "cannot read its configuration"),
        ({"model_type": "llama", "quantization_config": {}}, UnsupportedModelError, "already quantised"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(
    tmp_path: Path, content: dict[str, object], error: type[ExportError], text: str
) -> None:
    source = tiny.make_shell(tmp_path / "model", content)
    assert text in refusal(source, tmp_path / "out", error)


def test_native_models_may_carry_an_auto_map(tmp_path: Path) -> None:
    source = tiny.make_shell(tmp_path / "model", {"model_type": "llama", "auto_map": {"AutoConfig": "a.B"}})
    assert find(source).directory == source


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", None])
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, content: bytes | None) -> None:
    source = tiny.make_shell(tmp_path / "model", {})
    (source / "config.json").unlink()
    (source / "config.json").mkdir() if content is None else (source / "config.json").write_bytes(content)
    assert "config.json: " in refusal(source, tmp_path / "out", CheckpointError)


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    text = refusal(tmp_path / "model", tmp_path / "out", CheckpointError)
    assert "expected a transformers directory with config.json, found none" in text


def test_an_adapter_is_not_taken_for_a_model(tmp_path: Path) -> None:
    source = tiny.make_shell(tmp_path / "model", {"model_type": "llama"}, weights=True)
    (source / "adapter_config.json").write_text("{}", "utf-8")  # the base model may lie in the same folder
    text = refusal(source, tmp_path / "out", UnsupportedModelError)
    assert "an adapter (LoRA), not a model: merge it" in text


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    source = tiny.make_shell(tmp_path / "model", {"model_type": "llama"}, weights=False)
    (source / "pytorch_model.bin").write_bytes(b"\x80\x04")
    text = refusal(source, tmp_path / "out", CheckpointError)
    assert "expected *.safetensors weights, found none (pickles are not read" in text


def test_truncated_safetensors_are_refused_by_name(tiny_source: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny_source, source)
    whole = (tiny_source / "model.safetensors").read_bytes()
    for length in (0, 4, 8, 100, 2000, len(whole) // 2, len(whole) - 1):
        (source / "model.safetensors").write_bytes(whole[:length])
        text = refusal(source, tmp_path / "out", CheckpointError)
        assert "model.safetensors: not a readable safetensors file" in text


def test_a_missing_shard_is_refused(tiny_source: Path, tmp_path: Path, works: None) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny_source, source)
    (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    assert "model-00002-of-00002.safetensors" in refusal(source, tmp_path / "out", CheckpointError)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf")


def test_a_truncated_gguf_file_is_refused_wherever_it_ends(gguf_file: Path, tmp_path: Path) -> None:
    whole = gguf_file.read_bytes()
    path = tmp_path / "cut.gguf"
    lengths = [*range(0, 100, 7), 1000, 5000, *range(10_000, len(whole), len(whole) // 10), len(whole) - 1]
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: .*download it again$"):
            find(path)


@pytest.mark.parametrize("content", [b"garbage" * 100, b"GGUF" + b"\xff" * 100, b"GGUF\x03" + b"\0" * 100, b"\x89PNG"])
def test_garbage_is_no_gguf_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert "model.gguf: " in refusal(path, tmp_path / "out", CheckpointError)


def test_a_whole_gguf_file_is_counted_from_its_header(gguf_file: Path) -> None:
    found = find(gguf_file)
    assert found.gguf_file == "whole.gguf"
    assert found.licence == "apache-2.0"
    assert found.num_parameters == 2 * 340 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 3 * 64
    assert found.weight_bytes == 4 * found.num_parameters


def test_an_unknown_name_lists_near_names(tmp_path: Path) -> None:
    assert "unknown model 'smollm2-135' (did you mean smollm2-135m?)" in refusal(
        "smollm2-135", tmp_path / "out", CheckpointError
    )
    assert "(known: qwen2.5-coder-0.5b," in refusal("xyzzy", tmp_path / "out", CheckpointError)


def test_a_hub_model_while_offline_is_one_line(tmp_path: Path) -> None:
    text = refusal("someone/some-model", tmp_path / "out", CheckpointError)
    assert text.startswith("cannot reach the hub for someone/some-model (")
    assert text.endswith("download it elsewhere and give the directory")


def test_a_wrong_path_is_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "unknown model 'models/missing'" in refusal("models/missing", tmp_path / "out", CheckpointError)


def test_nothing_to_do_and_two_things_to_do_are_refused(tiny_source: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    for source, base in ((None, None), (tiny_source, tiny_artifact)):
        with pytest.raises(ExportError, match="expected either a MODEL to export or --add-to DIR"):
            tiny.export_tiny(source, tmp_path / "out", add_to=base)


def test_too_little_room_on_the_disk_is_refused(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    text = refusal(tiny_source, tmp_path / "deep" / "out", ExportError)
    assert "needed for the artifact, 0 MB free: free some space" in text


def test_attention_sinks_are_refused(tmp_path: Path) -> None:
    settings = {**SMALL, "head_dim": 16, "num_key_value_heads": 2, "num_local_experts": 1, "num_experts_per_tok": 1}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sinks = config("GptOssConfig", **settings, max_position_embeddings=512, rope_parameters=rope, pad_token_id=0)
    source = tiny.make_shell(tmp_path / "model", sinks)  # known before any weight is read
    text = refusal(source, tmp_path / "out", UnsupportedModelError)
    assert text == "GptOssAttention cannot be exported: its attention sinks are not supported"


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n", "apache-2.0"),
        ("---\ntags: x\nlicense:   other\n---\n", "other"),
        ('---\nlicense: "mit"\n---\n', "mit"),
        ("---\nlicense:\n- mit\n---\n", None),
        ("---\ntags: x\n---\nlicense: mit\n", None),
        ("# Title\n\nlicense: mit\n", None),
        ("", None),
    ],
)
def test_the_licence_is_read_from_the_front_matter(tmp_path: Path, card: str, licence: str | None) -> None:
    source = tiny.make_shell(tmp_path / "model", {"model_type": "llama"})
    (source / "README.md").write_text(card, "utf-8")
    assert find(source).licence == licence


def test_a_generation_config_that_is_no_json_is_named(tiny_source: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny_source, source)
    (source / "generation_config.json").write_text("{do_sample: true}")
    assert "generation_config.json: not readable as JSON" in refusal(source, tmp_path / "out", CheckpointError)


def test_a_local_model_is_named_by_its_folder(tiny_source: Path) -> None:
    found = find(tiny_source)
    assert (found.name, found.source) == (tiny_source.name, tiny_source.name)


def test_only_the_weights_that_transformers_reads_are_counted(tiny_source: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny_source, source)
    shutil.copy(source / "model.safetensors", source / "consolidated.safetensors")
    assert find(source).num_parameters == find(tiny_source).num_parameters


@pytest.mark.parametrize("name", ["License.md", "license.txt", "NOTICE", "USE_POLICY.md", "Readme.md"])
def test_documents_travel_however_they_are_spelled(tiny_source: Path, tmp_path: Path, name: str) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny_source, source)
    (source / name).write_text("terms", "utf-8")
    assert find(source).documents == {name: "terms"}
