"""Folders of diffusion models as they are published, in odd shapes: against transformers' classes of the models they
were made from, with a mask that lets tokens see what theirs do; LLaDA 2 against a transcription."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Backend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from kvarn.models.spec import Autoregressive, MaskedDiffusion
from tests.damaged_models import assert_damage_is_refused
from tests.diffusion_models import CONFIGS, LIKE, MASK_ID, diffusion_tensors, tiny_diffusion
from tests.parity.test_diffusion_models import TorchModel
from tests.running import all_logits, layout_of, scattered_table
from tests.tiny_gguf import Tensors, stack_experts
from tests.tiny_models import COMMON
from tests.torch_backend import torch_cpu

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-3
NUM_IDS = 33
SHAPES: list[dict[str, Any]] = [
    {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 70},
    {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12, "num_hidden_layers": 1}
    | {"tie_word_embeddings": True, "rms_norm_eps": 0.01},
    {"hidden_size": 56, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 14, "rope_theta": 77.0},
]
# Model type, the key of its blocks (None: there are none), their length, whether the logits are shifted.
KINDS: dict[str, tuple[str, str | None, int, bool]] = {
    "fast-dllm": ("Fast_dLLM_Qwen", "bd_size", 5, True),
    "dream": ("Dream", None, 0, True),
    "dream-blocks": ("Dream", "block_size", 7, True),
    "mdlm-llama": ("a2d-llama", None, 0, False),
    "mdlm-qwen2": ("a2d-qwen2", None, 0, False),
    "mdlm-qwen3": ("a2d-qwen3", None, 0, False),
    "bd3lm-qwen3": ("a2d-qwen3", "block_size", 6, False),
    "open-dcoder": ("qwen2", None, 0, True),
}
LLADA2_SHAPES: list[dict[str, Any]] = [
    {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "block_size": 5}
    | {"num_experts": 15, "n_group": 5, "topk_group": 2, "num_experts_per_tok": 4, "num_shared_experts": 2},
    {"num_key_value_heads": 4, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}
    | {"use_qk_norm": False, "use_qkv_bias": True, "use_bias": True, "block_size": 11},
    {"hidden_size": 56, "head_dim": 14, "partial_rotary_factor": 1.0, "num_key_value_heads": 1, "rope_theta": 600000}
    | {"first_k_dense_replace": 2, "routed_scaling_factor": 1.0, "tie_word_embeddings": True, "block_size": 32},
]
# As LLaDA2.0-mini's config.json has them, beside the keys of the tiny models.
PUBLISHED = {
    "norm_head": False,
    "norm_softmax": False,
    "use_rmsnorm": True,
    "using_split_qkv_in_self_attention": False,
    "moe_router_enable_expert_bias": True,
    "rotary_dim": 64,
    "router_dtype": "fp32",
    "embedding_dropout": 0.0,
    "output_dropout": 0.0,
    "output_router_logits": False,
    "max_window_layers": 28,
    "use_sliding_window": False,
    "rope_scaling": None,
    "use_cache": False,
}
REFUSED: dict[str, Any] = {
    "norm_head": True,
    "score_function": "softmax",
    "norm_topk_prob": False,
    "moe_router_enable_expert_bias": False,
    "use_sliding_window": True,
    "delete_token_id": 7,
    "split_token_id": 8,
    "sliding_window": 16,
    "num_nextn_predict_layers": 2,
}


# Also as GGUF. Every head of LLaDA has keys of its own.
ODD_SHAPES: dict[str, list[dict[str, Any]]] = {
    "llada": [shape | {"num_key_value_heads": shape["num_attention_heads"], "head_dim": None} for shape in SHAPES],
    "llada-moe": [
        SHAPES[0] | {"num_experts": 5, "num_experts_per_tok": 2, "head_dim": 10},
        SHAPES[1] | {"num_experts": 7, "num_experts_per_tok": 1, "moe_intermediate_size": 40},
        SHAPES[2] | {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 10},
    ],
    "sdar": [shape | {"block_size": size} for shape, size in zip(SHAPES, (5, 7, 11), strict=True)],
    "dream": [shape | {"head_dim": None} for shape in SHAPES],
}


def folder_of(kind: str, shape: dict[str, Any], folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write one model; open-dcoder says by its tokenizer that it is one of diffusion."""
    model_type, key, length, _ = KINDS[kind]
    config = COMMON | shape | {"model_type": model_type, "hidden_act": "silu"}
    config |= {key: length} if key else {}
    path = folder / kind
    path.mkdir()
    tensors = diffusion_tensors(kind, config | {"model_type": {"qwen2": "a2d-qwen2"}.get(model_type, model_type)})
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    added = {str(MASK_ID): {"content": "<M>", "special": True}}
    (path / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<M>", "added_tokens_decoder": added}))
    return path, config


def reference_logits(path: Path, ids: list[int]) -> npt.NDArray[np.float32]:
    return logits_of(ReferenceBackend(), path, ids)


def logits_of(backend: Backend, path: Path, ids: list[int]) -> npt.NDArray[np.float32]:
    described = describe(open_weights(path))
    assert backend.unsupported(described.spec) == []
    backend.load(described.spec, described.weights)
    layout = layout_of(described.spec, block_size=16)
    backend.reserve_kv(layout, 16 * layout.block_bytes)
    return all_logits(backend, scattered_table(16, 3), ids, (len(ids),))


def transformers_logits(
    config: dict[str, Any], tensors: dict[str, npt.NDArray[np.float32]], ids: list[int], block: int
) -> npt.NDArray[np.float32]:
    """What the class that a model was made from says where tokens see those of their own block and of earlier ones."""
    like = LIKE.get(config["model_type"], config["model_type"])
    plain = transformers.AutoConfig.for_model(like, **{k: v for k, v in config.items() if k != "model_type"})
    plain._attn_implementation = "eager"
    plain._experts_implementation = "eager"  # the fast one wants columns of whole vectors
    model = transformers.AutoModelForCausalLM.from_config(plain).eval()
    weights = {name: torch.tensor(values) for name, values in _fused_experts(stack_experts(tensors)).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    block_of = torch.arange(len(ids)) // block
    mask = torch.zeros(len(ids), len(ids)).masked_fill(block_of[None, :] > block_of[:, None], float("-inf"))
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0].numpy()
    return logits


def _fused_experts(tensors: Tensors) -> Tensors:
    """Gate and up of experts as one, as the class has them."""
    found = {name: values for name, values in tensors.items() if ".experts." not in name}
    for name in [name for name in tensors if name.endswith("experts.gate_proj.weight")]:
        stem = name.removesuffix("gate_proj.weight")
        found[f"{stem}gate_up_proj"] = np.concatenate([tensors[name], tensors[f"{stem}up_proj.weight"]], axis=1)
        found[f"{stem}down_proj"] = tensors[f"{stem}down_proj.weight"]
    return found


def token_ids(vocab_size: int) -> list[int]:
    ids = np.random.default_rng(vocab_size).integers(3, vocab_size, NUM_IDS).tolist()
    return [*ids[:-6], *[MASK_ID] * 6]


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_with_the_models_mask(kind: str, shape: int, tmp_path: Path) -> None:
    path, config = folder_of(kind, SHAPES[shape], tmp_path)
    _, _, length, shift = KINDS[kind]
    ids = token_ids(config["vocab_size"])
    expected = transformers_logits(config, load_file(path / "model.safetensors"), ids, length or NUM_IDS)
    assert np.std(expected) > 0.1
    found = reference_logits(path, ids)
    assert np.abs(found - expected).max() <= TOLERANCE
    for backend in (NativeBackend(2), torch_cpu()):
        assert np.abs(logits_of(backend, path, ids) - found).max() <= 2e-5 * max(1.0, float(np.abs(found).max()))
    generation = MaskedDiffusion(MASK_ID, shift, length or None)
    assert describe(open_weights(path)).spec.generation == generation


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("arch", ODD_SHAPES)
def test_models_with_names_of_their_own_have_them_too(
    arch: str, shape: int, format: Literal["safetensors", "gguf"], tmp_path: Path
) -> None:
    changes = {key: value for key, value in ODD_SHAPES[arch][shape].items() if value is not None}
    config = CONFIGS[arch] | changes
    path, ids = tiny_diffusion(arch, tmp_path, format, **changes), token_ids(config["vocab_size"])
    tensors = diffusion_tensors(arch, config)
    expected = transformers_logits(config, tensors, ids, config.get("block_size", NUM_IDS))
    assert np.std(expected) > 0.1
    found = reference_logits(path, ids)
    assert np.abs(found - expected).max() <= TOLERANCE
    for backend in (NativeBackend(2), torch_cpu()):
        assert np.abs(logits_of(backend, path, ids) - found).max() <= 2e-5 * max(1.0, float(np.abs(found).max()))


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize("shape", range(len(LLADA2_SHAPES)))
def test_logits_of_llada_2_are_those_of_the_transcription(
    shape: int, format: Literal["safetensors", "gguf"], tmp_path: Path
) -> None:
    changes = LLADA2_SHAPES[shape]
    path = tiny_diffusion("llada2", tmp_path, format, **changes)
    ids = token_ids(CONFIGS["llada2"]["vocab_size"])
    expected = TorchModel("llada2", **changes).logits(ids)
    assert np.std(expected) > 0.1
    found = reference_logits(path, ids)
    assert np.abs(found - expected).max() <= TOLERANCE
    for backend in (NativeBackend(2), torch_cpu()):
        assert np.abs(logits_of(backend, path, ids) - found).max() <= 2e-5 * max(1.0, float(np.abs(found).max()))


@pytest.mark.parametrize("arch", CONFIGS)
def test_damaged_files_are_refused(arch: str, tmp_path: Path) -> None:
    assert_damage_is_refused(open_weights(tiny_diffusion(arch, tmp_path, "gguf")), len(arch))


def test_merged_experts_of_llada_2_are_the_same_model(tmp_path: Path) -> None:
    path = tiny_diffusion("llada2", tmp_path)
    ids = token_ids(CONFIGS["llada2"]["vocab_size"])
    expected = reference_logits(path, ids)
    tensors = load_file(path / "model.safetensors")
    for layer in (1, 2):
        for part in ("gate_proj", "up_proj", "down_proj"):
            stem = f"model.layers.{layer}.mlp.experts."
            single = [tensors.pop(f"{stem}{e}.{part}.weight") for e in range(CONFIGS["llada2"]["num_experts"])]
            tensors[stem + part] = np.stack(single)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    _edit(path, model_type="llada2_moe_veomni")
    np.testing.assert_array_equal(reference_logits(path, ids), expected)


def test_what_llada_2_folders_say_is_known(tmp_path: Path) -> None:
    path = tiny_diffusion("llada2", tmp_path)
    plain = describe(open_weights(path)).spec
    _edit(path, **PUBLISHED)
    assert describe(open_weights(path)).spec == plain
    _edit(path, block_size=None, mask_token_id=None, vocab_size=None)
    with pytest.raises(FormatError, match="mask_token_id is 156895; expected a token of the vocabulary of 160"):
        describe(open_weights(path))  # the id of all these models, which this tiny vocabulary lacks
    _edit(path, mask_token_id=MASK_ID)
    assert describe(open_weights(path)).spec.generation == MaskedDiffusion(MASK_ID, shift=False, block=32)


@pytest.mark.parametrize("key", REFUSED)
def test_what_would_be_another_model_is_refused_by_name(key: str, tmp_path: Path) -> None:
    path = tiny_diffusion("llada2", tmp_path, **{key: REFUSED[key]})
    with pytest.raises(UnsupportedModel, match=key):
        describe(open_weights(path))


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("fast-dllm", "block_size", 8),
        ("fast-dllm", "use_sliding_window", True),
        ("mdlm-qwen3", "bd_size", 8),
        ("mdlm-llama", "sliding_window", 8),
        ("open-dcoder", "block_size", 8),
    ],
)
def test_stray_keys_of_adapted_models_are_refused_by_name(kind: str, key: str, value: object, tmp_path: Path) -> None:
    path, _ = folder_of(kind, SHAPES[0], tmp_path)
    _edit(path, **{key: value}, max_window_layers=0)
    with pytest.raises(UnsupportedModel, match=key if key != "use_sliding_window" else "sliding window"):
        describe(open_weights(path))


def test_without_a_mask_token_an_adapted_model_is_refused_and_a_qwen2_is_one(tmp_path: Path) -> None:
    adapted, _ = folder_of("mdlm-qwen3", SHAPES[0], tmp_path)
    (adapted / "tokenizer_config.json").write_text("{}")
    with pytest.raises(FormatError, match="the tokenizer has no mask_token; which token is the mask"):
        describe(open_weights(adapted))
    (adapted / "special_tokens_map.json").write_text(json.dumps({"mask_token": {"content": "<|mask|>"}}))
    (adapted / "added_tokens.json").write_text(json.dumps({"<|mask|>": 9}))
    described = describe(open_weights(adapted))
    assert described.spec.generation == MaskedDiffusion(9, shift=False, block=None)
    assert any("block_size" in note for note in described.notes)
    coder, _ = folder_of("open-dcoder", SHAPES[0], tmp_path)
    assert any("mask token" in note for note in describe(open_weights(coder)).notes)
    (coder / "tokenizer_config.json").unlink()
    assert describe(open_weights(coder)).spec.generation == Autoregressive()


def _edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_a_canvas_that_changes_its_length_is_refused_by_name(tmp_path: Path) -> None:
    """DreamOn has the config.json of a Dream."""
    path = tiny_diffusion("dream", tmp_path)
    describe(open_weights(path))
    (path / "generation_config.json").write_text('{"expand_token_id": 5, "mask_token_id": 3}')
    with pytest.raises(UnsupportedModel, match="expand_token_id") as error:
        describe(open_weights(path))
    assert error.value.fields == ("expand_token_id",)
