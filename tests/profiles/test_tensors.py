"""The call contract: names, order, types and shapes."""

from dataclasses import replace

from specrt_profiles.profile import Profile
from specrt_profiles.tensors import DecoderDims, graph_inputs, graph_outputs

DIMS = DecoderDims(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=64, vocab_size=300)
PROFILE = Profile(name="small", capacity=100, prefill_width=8, verify_widths=(2, 16))


def test_the_inputs_are_the_call_and_the_kv_buffers_layer_by_layer() -> None:
    call = ["input_ids", "position_ids", "seqlens_k", "total_sequence_length", "logits_indices"]
    kv = ["past_key.0", "past_value.0", "past_key.1", "past_value.1"]
    assert [spec.name for spec in graph_inputs(DIMS, PROFILE)] == call + kv


def test_the_outputs_are_logits_and_the_same_buffers() -> None:
    kv = ["present_key.0", "present_value.0", "present_key.1", "present_value.1"]
    assert [spec.name for spec in graph_outputs(DIMS, PROFILE)] == ["logits", *kv]


def test_types_and_shapes_are_the_documented_ones() -> None:
    found = {
        spec.name: (spec.dtype, spec.shape) for spec in (*graph_inputs(DIMS, PROFILE), *graph_outputs(DIMS, PROFILE))
    }
    assert found["input_ids"] == found["position_ids"] == ("int64", (1, "width"))
    assert found["seqlens_k"] == ("int32", (1,))
    assert found["total_sequence_length"] == ("int32", ())
    assert found["logits_indices"] == ("int64", ("rows",))
    assert found["logits"] == ("float32", (1, "rows", 300))
    assert found["past_key.1"] == found["past_value.0"] == found["present_value.1"] == ("float32", (1, 2, 116, 16))


def test_the_tensorrt_dialect_says_where_to_write_instead_of_how_long_the_buffers_are() -> None:
    ort, trt = (graph_inputs(DIMS, replace(PROFILE, dialect=name)) for name in ("ort", "tensorrt"))
    only_ort, only_trt = set(ort) - set(trt), set(trt) - set(ort)
    assert {spec.name for spec in only_ort} == {"seqlens_k", "total_sequence_length"}
    assert [(spec.name, spec.dtype, spec.shape) for spec in only_trt] == [("write_indices", "int64", (1,))]
    assert [spec.name for spec in trt][:4] == ["input_ids", "position_ids", "write_indices", "logits_indices"]
    assert graph_outputs(DIMS, PROFILE) == graph_outputs(DIMS, replace(PROFILE, dialect="tensorrt"))


def test_a_graph_that_takes_trees_sees_its_own_rows_by_a_mask_and_all_slots_by_length() -> None:
    for dialect in ("ort", "tensorrt"):
        chains, trees = (graph_inputs(DIMS, replace(PROFILE, dialect=dialect, trees=value)) for value in (False, True))
        more = [(spec.name, spec.dtype, spec.shape) for spec in trees if spec not in chains]
        assert more == [("tree_mask", "bool", (1, "width", "width"))]
        less = [spec.name for spec in chains if spec not in trees]
        assert less == (["total_sequence_length"] if dialect == "ort" else [])


def test_kv_bytes_are_those_of_the_buffers() -> None:
    past = [spec for spec in graph_inputs(DIMS, PROFILE) if spec.name.startswith("past")]
    values = sum(int(a) * int(b) * int(c) * int(d) for a, b, c, d in (spec.shape for spec in past))
    assert DIMS.kv_bytes(PROFILE.slots, "float32") == 4 * values
    assert DIMS.kv_bytes(PROFILE.slots, "int8") == values
