"""Tiny random encoders that transformers has classes for, in shapes that nobody would choose, as folders and as GGUF.

Three of each family; the third scores pairs of texts, where the family has classifiers.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType
from tests.tiny_families import randomise

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB = 90
# Heads, width, hidden, layers.
SHAPES = ((4, 64, 96, 3), (3, 72, 56, 4), (5, 40, 88, 2))
NAMES = ("num_attention_heads", "hidden_size", "intermediate_size", "num_hidden_layers")
DISTILBERT = dict(zip(NAMES, ("n_heads", "dim", "hidden_dim", "n_layers"), strict=True))
PLAIN = {"rope_type": "default"}
SCORES = {"num_labels": 1}
GEMMA = {"use_bidirectional_attention": True, "num_key_value_heads": 1, "pad_token_id": 0}
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "bert": ({}, {"hidden_act": "gelu_new"}, SCORES),
    "roberta": ({}, {"pad_token_id": 3, "layer_norm_eps": 1e-3}, {"num_labels": 3}),
    "xlm-roberta": ({}, {"type_vocab_size": 1}, SCORES),
    "camembert": ({}, {"pad_token_id": 0}, SCORES),
    "distilbert": ({}, {"sinusoidal_pos_embds": True}, {"num_labels": 2}),
    "modernbert": (
        {"local_attention": 8},
        {"local_attention": 5, "attention_bias": True, "mlp_bias": True, "norm_bias": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN | {"rope_theta": 500.0}}},
        {"local_attention": 6, "classifier_pooling": "mean", "classifier_activation": "tanh"} | SCORES,
    ),
    "nomic_bert": ({}, {"rope_parameters": PLAIN | {"rope_theta": 700.0}}, {"hidden_act": "gelu"}),
    "jina_embeddings_v3": ({}, {"rope_parameters": PLAIN | {"rope_theta": 700.0}}, SCORES),
    "eurobert": (
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 5, "rope_parameters": PLAIN | {"rope_theta": 700.0}},
    ),
    "gemma3_text": (
        GEMMA | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
        | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
        GEMMA | {"head_dim": 24, "sliding_window": 5, "query_pre_attn_scalar": 30}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2},
        GEMMA | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3": (
        {"head_dim": 16, "num_key_value_heads": 2},
        {"head_dim": 24, "num_key_value_heads": 1, "tie_word_embeddings": True},
        {"head_dim": 8, "num_key_value_heads": 5, "num_labels": 2},
    ),
}  # fmt: skip
FAMILIES = tuple(VARIANTS)
POOLINGS = {"gemma3_text": "mean", "qwen3": "last", "xlm-roberta": "cls"}
DENSE: dict[tuple[str, int], tuple[tuple[int, str, bool], ...]] = {
    ("gemma3_text", 1): ((48, "Identity", False), (20, "Tanh", True)),
    ("gemma3_text", 2): ((48, "Identity", False), (20, "Identity", False)),
}


def encoder_config(family: str, shape: int) -> dict[str, Any]:
    sizes = dict(zip(NAMES, SHAPES[shape], strict=True))
    sizes = {DISTILBERT[name]: value for name, value in sizes.items()} if family == "distilbert" else sizes
    ids = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    if family == "eurobert":
        ids = {"bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}
    elif family != "modernbert":
        ids = {}
    usual = {
        "vocab_size": VOCAB,
        "max_position_embeddings": 68,
        "pad_token_id": 1 if "rob" in family or "jina" in family else 0,
    }
    return usual | ids | sizes | VARIANTS[family][shape]


def encoder_folder(family: str, shape: int, folder: Path) -> tuple[Any, Path]:
    """Make a model of transformers, and save it as sentence-transformers would."""
    config = transformers.AutoConfig.for_model(family, **encoder_config(family, shape))
    config._attn_implementation = "eager"
    is_scoring = "num_labels" in VARIANTS[family][shape]
    kind = transformers.AutoModelForSequenceClassification if is_scoring else transformers.AutoModel
    model = kind.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed=zlib.crc32(f"{family}-{shape}".encode()))
    path = folder / f"{family}-{shape}"
    model.save_pretrained(path)
    if family in POOLINGS and not is_scoring:
        _write_modules(path, POOLINGS[family], DENSE.get((family, shape), ()))
    return model, path


def _write_modules(path: Path, pooling: str, dense: tuple[tuple[int, str, bool], ...]) -> None:
    kinds = ["Transformer", "Pooling", *("Dense" for _ in dense), "Normalize"]
    paths = ["" if kind == "Transformer" else f"{number}_{kind}" for number, kind in enumerate(kinds)]
    steps = [{"idx": i, "path": p, "type": f"a.b.{k}"} for i, (k, p) in enumerate(zip(kinds, paths, strict=True))]
    (path / "modules.json").write_text(json.dumps(steps))
    flags = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
    _write_config(path / "1_Pooling", {f"pooling_mode_{flag}": name == pooling for name, flag in flags.items()})
    width = json.loads((path / "config.json").read_text())["hidden_size"]
    rng = np.random.default_rng(3)
    for number, (out, activation, bias) in enumerate(dense, 2):
        config = {"in_features": width, "out_features": out, "bias": bias}
        _write_config(path / f"{number}_Dense", config | {"activation_function": f"torch.nn.modules.{activation}"})
        tensors = {"linear.weight": rng.standard_normal((out, width)).astype(np.float32) / 8}
        tensors |= {"linear.bias": rng.standard_normal(out).astype(np.float32)} if bias else {}
        save_file(tensors, path / f"{number}_Dense" / "model.safetensors")
        width = out


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


NOMIC_NAMES = {
    "embeddings.LayerNorm": "emb_ln",
    "self_attn.o_proj": "attn.out_proj",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.up_proj": "mlp.fc11",
    "mlp.down_proj": "mlp.fc2",
}
NOMIC_KEYS = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"} | {
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "layer_norm_eps": "layer_norm_epsilon"
}  # fmt: skip


def nomic_of_its_authors(folder: Path, target: Path) -> Path:
    """The same model with the names that nomic-embed-text was published with."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    found: dict[str, Any] = {}
    for name in list(tensors):
        if name.endswith("self_attn.q_proj.weight"):
            stem = name.removesuffix("self_attn.q_proj.weight")
            parts = [tensors.pop(f"{stem}self_attn.{part}_proj.weight") for part in "qkv"]
            found[f"encoder.{stem}attn.Wqkv.weight"] = np.concatenate(parts)
    for old, values in tensors.items():
        name = old
        for theirs, ours in NOMIC_NAMES.items():
            name = name.replace(theirs, ours)
        if "pooler" not in name:
            found[f"encoder.{name}" if name.startswith("layers.") else name] = values
    save_file(found, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {new: config.pop(old) for old, new in NOMIC_KEYS.items()}
    config |= {"rotary_emb_base": rope["rope_theta"], "activation_function": "swiglu", "causal": False}
    config |= {"rotary_emb_fraction": 1.0, "prenorm": False, "qkv_proj_bias": False, "rotary_scaling_factor": None}
    del config["hidden_act"], config["head_dim"]
    (target / "config.json").write_text(json.dumps(config))
    return target


GGUF_NAMES = {
    "modernbert": "modern-bert",
    "nomic_bert": "nomic-bert",
    "gemma3_text": "gemma-embedding",
    "qwen3": "qwen3",
    "eurobert": "eurobert",
}
GGUF_KEYS = {
    "embedding_length": ("hidden_size", "dim", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layers", "n_layer"),
    "attention.head_count": ("num_attention_heads", "n_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "feed_forward_length": ("intermediate_size", "hidden_dim", "n_inner"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.sliding_window": ("local_attention", "sliding_window"),
}


def encoder_gguf(folder: Path) -> Path:
    """Write the GGUF file that llama.cpp's converter makes of a folder, beside it."""
    c = json.loads((folder / "config.json").read_text())
    family = c["model_type"]
    arch = GGUF_NAMES.get(family, "bert")
    number = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    facts = {key: c[name] for key, names in GGUF_KEYS.items() for name in names if c.get(name) is not None}
    offset = c["pad_token_id"] + 1 if family in ("roberta", "xlm-roberta", "camembert") else 0
    facts["context_length"] = c.get("max_position_embeddings", c.get("n_positions")) - offset
    names = gguf.get_tensor_name_map(number, facts["block_count"])
    tensors = load_file(folder / "model.safetensors")
    has_classifier = any(name.startswith(("classifier", "score")) for name in tensors)
    found: dict[str, Any] = {}
    for theirs, values in tensors.items():
        name = theirs.removeprefix("roberta.").removeprefix("distilbert.").removeprefix("bert.")
        name = name.removeprefix("model.") if arch == "modern-bert" else name
        if ("pooler" in name and not has_classifier) or name.startswith("lm_head"):
            continue
        name = (
            f"model.{name}"
            if family in ("gemma3_text", "qwen3", "eurobert") and not name.startswith("model.")
            else name
        )
        is_shifted = family == "gemma3_text" and name.endswith("norm.weight")
        kept = values[offset:] if "position_embeddings" in name else values
        found[_gguf_name(name, names)] = kept + 1 if is_shifted else kept
    facts |= _pooling(folder, found, has_classifier)
    facts |= _own_facts(c, family)
    stored = {name: Stored.quantized(values, TensorType.F32) for name, values in found.items()}
    path = folder.with_suffix(".gguf")
    write_gguf(path, {"general.architecture": arch} | {f"{arch}.{key}": one for key, one in facts.items()}, stored)
    return path


def _gguf_name(name: str, names: Any) -> str:
    for theirs, ours in {"pooler.dense": "cls", "pre_classifier": "cls"}.items():
        name = name.replace(theirs, ours)
    if name.startswith(("cls.", "classifier.weight", "classifier.bias")) or name == "model.score.weight":
        return name.replace("classifier.", "cls.output.").replace("model.score.", "cls.output.")
    found: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _pooling(folder: Path, tensors: dict[str, Any], has_classifier: bool) -> dict[str, Any]:
    if has_classifier:
        return {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]}
    kinds = {"mean_tokens": 1, "cls_token": 2, "lasttoken": 3}
    if not (folder / "modules.json").exists():
        return {"pooling_type": 1}
    for dense in sorted(folder.glob("?_Dense")):
        for name, values in load_file(dense / "model.safetensors").items():
            tensors[name.replace("linear", f"dense_{dense.name[0]}")] = values
    flags = json.loads((folder / "1_Pooling" / "config.json").read_text())
    return {"pooling_type": next(kinds[k.removeprefix("pooling_mode_")] for k, is_on in flags.items() if is_on)}


def _own_facts(c: dict[str, Any], family: str) -> dict[str, Any]:
    if family == "qwen3":
        return {"rope.freq_base": c["rope_parameters"]["rope_theta"]}
    facts: dict[str, Any] = {"attention.causal": False}
    if family == "eurobert":
        facts |= {"rope.freq_base": c["rope_parameters"]["rope_theta"], "rope.scaling.type": "none"}
    if family == "distilbert":
        facts["attention.layer_norm_epsilon"] = 1e-12
    if family == "nomic_bert":
        facts["rope.freq_base"] = c["rotary_emb_base"]
    if family == "modernbert":
        full, local = (c["rope_parameters"][f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding"))
        facts |= {"rope.freq_base": full, "rope.freq_base_swa": local, "rope.scaling.type": "none", "vocab_size": VOCAB}
        facts |= {"attention.sliding_window_pattern": 3, "hidden_activation": "gelu"}
    if family == "gemma3_text":
        full, local = (c["rope_parameters"][f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding"))
        facts |= {"rope.freq_base": full, "rope.freq_base_swa": local}
        facts["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in c["layer_types"]]
    return facts
