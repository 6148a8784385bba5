"""What describe makes of good, strange and broken metadata."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvarn.errors import ConfigError, FormatError, KvarnError, ModelNotFound, UnsupportedModel
from kvarn.formats.gguf.writer import write_gguf
from kvarn.formats.open import open_weights
from kvarn.formats.weights import WeightSource
from kvarn.models.describe import describe
from kvarn.models.spec import Encoder, FeedForward, MixtureOfExperts
from tests.tiny_models import ARCHITECTURES, CONFIGS, tiny_model
from tests.unit.models.edited import Edited, edited_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def gguf(folder: Path) -> dict[str, WeightSource]:
    return {arch: open_weights(tiny_model(arch, folder, "gguf")) for arch in ARCHITECTURES}


@pytest.fixture(scope="module")
def hf(folder: Path) -> dict[str, WeightSource]:
    return {arch: open_weights(tiny_model(arch, folder)) for arch in ARCHITECTURES}


Sources = dict[str, WeightSource]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_both_formats_describe_the_same_model(arch: str, gguf: Sources, hf: Sources) -> None:
    one, other = describe(gguf[arch]).spec, describe(hf[arch]).spec
    assert len(one.blocks) == len(other.blocks)
    for a, b in zip(one.blocks, other.blocks, strict=True):
        assert a.feed_forward == b.feed_forward
        assert a.placement == b.placement
        assert a.attention.window == b.attention.window
        assert a.attention.scale == pytest.approx(b.attention.scale)
        if a.attention.rope is not None:
            assert b.attention.rope is not None
            assert a.attention.rope.inverse_frequencies == pytest.approx(b.attention.rope.inverse_frequencies, rel=1e-6)
            assert a.attention.rope.magnitude == pytest.approx(b.attention.rope.magnitude)
    assert (one.width, one.vocab_size, one.context_length) == (other.width, other.vocab_size, other.context_length)
    assert one.head == other.head


def test_windows_follow_the_five_to_one_pattern(gguf: Sources) -> None:
    blocks = describe(gguf["gemma3"]).spec.blocks
    assert [block.attention.window is None for block in blocks] == [False] * 5 + [True, False]
    local, glob = blocks[0].attention.rope, blocks[5].attention.rope
    assert local is not None
    assert glob is not None
    assert local.inverse_frequencies[-1] == pytest.approx(10000 ** (-30 / 32))
    assert glob.inverse_frequencies[-1] == pytest.approx(1000000 ** (-30 / 32) / 8)


def test_head_counts_may_differ_by_layer(gguf: Sources) -> None:
    shapes = {f"blk.1.attn_{name}.weight": (64, 64) for name in "kv"}
    source = Edited(gguf["llama"], {"llama.attention.head_count_kv": [2, 4]}, shapes)
    assert [block.attention.num_kv_heads for block in describe(source).spec.blocks] == [2, 4]


def test_dense_layers_between_layers_of_experts(hf: Sources) -> None:
    shapes: dict[str, tuple[int, ...] | None] = {name: None for name in hf["qwen3moe"].tensors if ".0.mlp." in name}
    for name, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
        shapes[f"model.layers.0.mlp.{name}_proj.weight"] = shape
    config = {**hf["qwen3moe"].metadata["hf"], "mlp_only_layers": [0]}
    spec = describe(Edited(hf["qwen3moe"], {"hf": config}, shapes)).spec
    assert isinstance(spec.blocks[0].feed_forward, FeedForward)
    assert isinstance(spec.blocks[1].feed_forward, MixtureOfExperts)


def test_factors_of_frequencies_hold_beside_a_scaling(gguf: Sources) -> None:
    def frequencies(**metadata: Any) -> tuple[float, ...]:
        changes = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
        rope = describe(Edited(gguf["llama3"], changes)).spec.blocks[0].attention.rope
        assert rope is not None
        return rope.inverse_frequencies

    assert "rope_freqs.weight" in gguf["llama3"].tensors
    halved = frequencies(type="linear", factor=2.0)
    assert halved == pytest.approx([frequency / 2 for frequency in frequencies()])


def test_a_causal_model_with_pooling_is_an_encoder(gguf: Sources) -> None:
    spec = describe(Edited(gguf["llama-tied"], {"llama.pooling_type": 3})).spec
    assert spec.generation == Encoder("last")
    assert spec.head is None


def test_the_folder_says_how_to_pool(folder: Path) -> None:
    path = tiny_model("bert", folder / "pooled")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    assert describe(open_weights(path)).spec.generation == Encoder("cls")
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(UnsupportedModel, match="pooling_mode_max_tokens"):
        describe(open_weights(path))


def test_a_step_of_sentence_transformers_that_changes_the_vectors_is_refused(folder: Path) -> None:
    path = tiny_model("bert", folder / "steps")
    steps = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    steps += [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (path / "modules.json").write_text(json.dumps(steps))
    with pytest.raises(ModelNotFound, match="1_Pooling"):  # it was not downloaded
        describe(open_weights(path))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    assert describe(open_weights(path)).spec.generation == Encoder("cls")
    (path / "modules.json").write_text(json.dumps([*steps, {"type": "sentence_transformers.models.LSTM"}]))
    with pytest.raises(UnsupportedModel, match=r"modules\.json has the step 'LSTM'"):
        describe(open_weights(path))
    (path / "modules.json").write_text("{}")
    with pytest.raises(FormatError, match="not a list of objects"):
        describe(open_weights(path))


def test_recommended_sampling_comes_from_the_metadata(gguf: Sources, folder: Path) -> None:
    source = Edited(gguf["llama"], {"general.sampling.temp": 0.6, "general.sampling.top_k": 20})
    assert describe(source).recommended == {"temperature": 0.6, "top_k": 20}
    path = tiny_model("qwen2", folder / "recommended")
    (path / "generation_config.json").write_text(json.dumps({"top_p": 0.8, "repetition_penalty": 1.1, "eos": 3}))
    assert describe(open_weights(path)).recommended == {"top_p": 0.8, "repetition_penalty": 1.1}


def test_an_absurd_recommendation_is_refused(gguf: Sources) -> None:
    with pytest.raises(FormatError, match="temperature"):
        describe(Edited(gguf["llama"], {"general.sampling.temp": math.nan}))


def test_a_file_that_is_no_model_is_told_as_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "statistics.gguf"
    write_gguf(path, {"general.type": "imatrix"}, {"x": np.ones((1, 32), np.float32)})
    with pytest.raises(FormatError, match=r"importance matrix for kvarn quantize --imatrix, no model"):
        describe(open_weights(path))


def test_an_unknown_architecture_is_named_with_the_known_ones(gguf: Sources, hf: Sources) -> None:
    with pytest.raises(UnsupportedModel, match=r"'rwkv7' is unknown; known are .*qwen3moe"):
        describe(Edited(gguf["llama"], {"general.architecture": "rwkv7"}))
    with pytest.raises(UnsupportedModel, match=r"'rwkv7' is unknown; known are .*qwen3_moe"):
        describe(edited_config(hf["llama"], model_type="rwkv7"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", 0, "1 to 1024"),
        ("llama.block_count", 2**32 - 1, "1 to 1024"),
        ("llama.block_count", "2", "1 to 1024"),
        ("llama.block_count", 3, "blk.2.attn_norm.weight is missing"),
        ("llama.embedding_length", 2**31, "1 to 1.04858e"),
        ("llama.embedding_length", 96, "token_embd.weight has shape"),
        ("llama.attention.head_count", 3, "not a multiple"),
        ("llama.attention.head_count", 2**20, "1 to 1024"),
        ("llama.attention.head_count_kv", 3, "not a multiple of its 3 KV heads"),
        ("llama.attention.head_count_kv", [2, 2, 2], "3 entries for 2 layers"),
        ("llama.attention.head_count_kv", [2, 0], "1 to 1024"),
        ("llama.feed_forward_length", 2**40, "expected a number"),
        ("llama.feed_forward_length", 64, "shape"),
        ("llama.rope.dimension_count", 7, "even"),
        ("llama.rope.dimension_count", 18, "rotates 18 of 16"),
        ("llama.rope.freq_base", math.nan, "expected a number"),
        ("llama.attention.layer_norm_rms_epsilon", None, "missing"),
        ("llama.attention.layer_norm_rms_epsilon", math.inf, "expected a number"),
        ("llama.vocab_size", 161, "160 rows, but vocab_size is 161"),
        ("tokenizer.ggml.tokens", ["a"] * 159, "number of tokens is 159"),
        ("llama.expert_count", 2000, "0 to 1024"),
        ("general.architecture", 7, "expected the name"),
    ],
)
def test_wrong_metadata_is_a_format_error(key: str, value: Any, message: str, gguf: Sources) -> None:
    with pytest.raises(FormatError, match=message):
        describe(Edited(gguf["llama"], {key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "dynamic"),
        ("llama.expert_gating_func", 2),
        ("llama.attn_logit_softcapping", 50.0),
        ("llama.attention.scale", 0.1),
        ("llama.attention.value_length", 32),
        ("llama.pooling_type", 4),
        ("llama.something_new", 1),
    ],
)
def test_metadata_that_would_change_the_arithmetic_is_refused(key: str, value: Any, gguf: Sources) -> None:
    with pytest.raises(UnsupportedModel) as error:
        describe(Edited(gguf["llama"], {key: value}))
    assert error.value.fields == (key.removeprefix("llama."),) or error.value.fields == (key,)


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {"hidden_act": "xielu"}),
        ("qwen2", {"mlp_bias": True}),
        ("llama", {"quantization_config": {"bits": 4}}),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "alpha": 2.0}}),
        ("llama", {"attn_logit_softcapping": 50.0}),
        ("bert", {"position_embedding_type": "relative_key"}),
        ("bert", {"is_decoder": True}),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}),
        ("gemma3", {"use_bidirectional_attention": True}),
    ],
)
def test_a_config_that_would_change_the_arithmetic_is_refused(arch: str, changes: Any, hf: Sources) -> None:
    with pytest.raises(UnsupportedModel):
        describe(edited_config(hf[arch], **changes))


def test_neutral_values_of_such_keys_pass(gguf: Sources, hf: Sources) -> None:
    assert describe(Edited(gguf["llama"], {"llama.expert_gating_func": 1, "llama.pooling_type": 0})).spec
    assert describe(edited_config(hf["llama"], mlp_bias=False, pretraining_tp=1, torch_dtype="float32")).spec


@pytest.mark.parametrize(
    ("arch", "tensor", "shape", "kind"),
    [
        ("llama", "blk.1.ffn_up.weight", None, FormatError),
        ("llama", "blk.1.ffn_up.weight", (64, 96), FormatError),
        ("llama", "blk.0.attn_norm.weight", (63,), FormatError),
        ("llama", "token_embd.weight", None, FormatError),
        ("llama", "token_embd.weight", (160, 64, 1), FormatError),
        ("llama", "blk.0.attn_k_norm.weight", (16,), UnsupportedModel),
        ("llama", "blk.2.ffn_up.weight", (96, 64), UnsupportedModel),
        ("qwen2", "blk.1.attn_k.bias", None, FormatError),
        ("mixtral", "blk.0.ffn_up_exps.weight", (3, 96, 64), FormatError),
        ("phi3", "blk.0.attn_qkv.weight", (128 + 1, 64), FormatError),
        ("phi3", "blk.0.ffn_up.weight", (96, 64), FormatError),
        ("llama3", "rope_freqs.weight", (9,), FormatError),
        ("bert", "position_embd.weight", (63, 64), FormatError),
    ],
)
def test_every_tensor_is_checked(arch: str, tensor: str, shape: Any, kind: type[Exception], gguf: Sources) -> None:
    with pytest.raises(kind, match=tensor.replace(".", r"\.")):
        describe(Edited(gguf[arch], shapes={tensor: shape}))


def test_a_missing_expert_is_found(hf: Sources) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    with pytest.raises(FormatError, match="lacks expert 2 of 4"):
        describe(Edited(hf["mixtral"], shapes={name: None}))


def test_a_context_of_zero_is_refused(gguf: Sources) -> None:
    with pytest.raises(ConfigError, match="context is 0"):
        describe(gguf["llama"], context=0)


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64),
    st.integers(0, 9),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-3, 2**40), max_size=4),
    st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "full_attention"]), st.floats() | st.text(max_size=6)
    ),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_metadata_raises_anything_but_our_own_errors(data: st.DataObject, gguf: Sources, hf: Sources) -> None:
    arch = data.draw(st.sampled_from(ARCHITECTURES))
    if data.draw(st.booleans()):
        keys = sorted(key for key in gguf[arch].metadata if not key.startswith("tokenizer."))
        source = Edited(gguf[arch], data.draw(st.dictionaries(st.sampled_from(keys), anything, min_size=1, max_size=3)))
    else:
        keys = sorted(
            {*CONFIGS[arch], "rope_scaling", "rope_parameters", "layer_types", "text_config", "mlp_only_layers"}
        )
        source = edited_config(
            hf[arch], **data.draw(st.dictionaries(st.sampled_from(keys), anything, min_size=1, max_size=3))
        )
    with contextlib.suppress(KvarnError):
        assert describe(source).spec.blocks
