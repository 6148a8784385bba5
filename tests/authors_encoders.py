"""Encoders in the layouts of their authors, where transformers has no class of the model: tensors under the published
names, and what the authors' code computes of them, transcribed from its description (sources at each).

Three of each in shapes that nobody would choose, as folders and as GGUF files with llama.cpp's names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType

torch = pytest.importorskip("torch")
F = torch.nn.functional

Float32 = npt.NDArray[np.float32]
Tensors = dict[str, Any]
VOCAB = 90
EPS = 1e-5
# Heads, width, hidden, layers.
SHAPES = ((4, 64, 96, 3), (3, 72, 56, 4), (5, 40, 88, 2))
EXPERTS = ((4, 2), (5, 1), (3, 3))  # and how many of them are active
BASE = 700.0


class Encoder:
    """One model: its tensors, its config.json, and what it makes of a text."""

    def __init__(self, shape: int) -> None:
        self.heads, self.width, self.hidden, self.layers = SHAPES[shape]
        self.rng = np.random.default_rng(shape)
        self.tensors: Tensors = {}
        self.config: dict[str, Any] = {}

    def add(self, name: str, *sizes: int) -> None:
        scale = 0.5 if len(sizes) == 1 else 1.5 / np.sqrt(sizes[-1])
        offset = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
        self.tensors[name] = (offset + scale * self.rng.standard_normal(sizes)).astype(np.float32)

    def add_linear(self, name: str, out: int, into: int, *, bias: bool = True) -> None:
        self.add(f"{name}.weight", out, into)
        if bias:
            self.add(f"{name}.bias", out)

    def add_norm(self, name: str) -> None:
        self.add(f"{name}.weight", self.width)
        self.add(f"{name}.bias", self.width)

    def at(self, name: str) -> Any:
        return torch.from_numpy(self.tensors[name])

    def linear(self, x: Any, name: str) -> Any:
        return F.linear(
            x, self.at(f"{name}.weight"), self.at(f"{name}.bias") if f"{name}.bias" in self.tensors else None
        )

    def norm(self, x: Any, name: str) -> Any:
        return F.layer_norm(x, (self.width,), self.at(f"{name}.weight"), self.at(f"{name}.bias"), EPS)

    def split(self, x: Any) -> Any:
        return x.view(len(x), self.heads, -1).transpose(0, 1)

    def states(self, ids: list[int]) -> Any:
        raise NotImplementedError

    def vector(self, ids: list[int]) -> Float32:
        found: Float32 = self.states(ids).mean(dim=0).numpy()
        return found

    def save(self, path: Path) -> Path:
        path.mkdir()
        save_file(self.tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(self.config))
        return path


class JinaBert(Encoder):
    """arXiv:2310.19923 and the published jina-bert-implementation (JinaBertEncoder.rebuild_alibi_tensor,
    JinaBertGLUMLP); shape 1 is that of jina-bert-v2-qk-post-norm, shape 2 scores pairs (JinaBertPooler, classifier)."""

    def __init__(self, shape: int) -> None:
        super().__init__(shape)
        self.is_code, self.is_scoring = shape == 1, shape == 2
        self.add("embeddings.word_embeddings.weight", VOCAB, self.width)
        self.add("embeddings.token_type_embeddings.weight", 2, self.width)
        self.add_norm("embeddings.LayerNorm")
        for layer in range(self.layers):
            self._add_layer(f"encoder.layer.{layer}.")
        if self.is_scoring:
            self.add_linear("pooler.dense", self.width, self.width)
            self.add_linear("classifier", 1, self.width)
        self.config = {"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"}
        self.config |= {"hidden_size": self.width, "num_attention_heads": self.heads, "emb_pooler": "mean"}
        self.config |= {"num_hidden_layers": self.layers, "intermediate_size": self.hidden, "layer_norm_eps": EPS}
        self.config |= {
            "vocab_size": VOCAB,
            "max_position_embeddings": 8192,
            "type_vocab_size": 2,
            "hidden_act": "gelu",
        }
        self.config |= {"attn_implementation": "torch", "use_cache": True}

    def _add_layer(self, stem: str) -> None:
        for part in ("query", "key", "value"):
            self.add_linear(f"{stem}attention.self.{part}", self.width, self.width)
        self.add_linear(f"{stem}attention.output.dense", self.width, self.width)
        self.add_norm(f"{stem}attention.output.LayerNorm")
        first, second = ("up_gated_layer", "down_layer") if self.is_code else ("gated_layers", "wo")
        self.add_linear(f"{stem}mlp.{first}", 2 * self.hidden, self.width, bias=False)
        self.add_linear(f"{stem}mlp.{second}", self.width, self.hidden)
        for name in ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2"):
            if self.is_code:
                self.add_norm(stem + name)
        if not self.is_code:
            self.add_norm(f"{stem}mlp.layernorm")

    def slopes(self) -> list[float]:
        def of_power(n: int) -> list[float]:
            first: float = 2 ** (-(2 ** -(np.log2(n) - 3)))
            return [first ** (i + 1) for i in range(n)]

        lower = 2 ** int(np.floor(np.log2(self.heads)))
        return (of_power(lower) + of_power(2 * lower)[0::2])[: self.heads]

    def states(self, ids: list[int]) -> Any:
        x = self.at("embeddings.word_embeddings.weight")[ids] + self.at("embeddings.token_type_embeddings.weight")[0]
        x = self.norm(x, "embeddings.LayerNorm")
        at = torch.arange(len(ids))
        bias = -torch.tensor(self.slopes())[:, None, None] * (at[None, :] - at[:, None]).abs()
        for layer in range(self.layers):
            x = self._layer(x, f"encoder.layer.{layer}.", bias.float())
        return x

    def _layer(self, x: Any, stem: str, bias: Any) -> Any:
        q, k, v = (self.linear(x, f"{stem}attention.self.{part}") for part in ("query", "key", "value"))
        if self.is_code:
            q, k = (self.norm(y, f"{stem}attention.self.layer_norm_{n}") for y, n in ((q, "q"), (k, "k")))
        q, k, v = self.split(q), self.split(k), self.split(v)
        p = torch.softmax(q @ k.transpose(1, 2) / (self.width / self.heads) ** 0.5 + bias, dim=-1)
        mixed = (p @ v).transpose(0, 1).reshape(x.shape)
        attended = self.norm(
            self.linear(mixed, f"{stem}attention.output.dense") + x, f"{stem}attention.output.LayerNorm"
        )
        if not self.is_code:
            gate, up = self.linear(attended, f"{stem}mlp.gated_layers").chunk(2, dim=-1)
            return self.norm(self.linear(F.gelu(gate) * up, f"{stem}mlp.wo") + attended, f"{stem}mlp.layernorm")
        residual = self.norm(x + attended, f"{stem}layer_norm_1")
        up, gate = self.linear(residual, f"{stem}mlp.up_gated_layer").chunk(2, dim=-1)
        return self.norm(residual + self.linear(up * F.gelu(gate), f"{stem}mlp.down_layer"), f"{stem}layer_norm_2")

    def vector(self, ids: list[int]) -> Float32:
        if not self.is_scoring:
            return super().vector(ids)
        pooled = torch.tanh(self.linear(self.states(ids)[:1], "pooler.dense"))
        found: Float32 = self.linear(pooled, "classifier")[0].numpy()
        return found


class NomicMoe(Encoder):
    """arXiv:2502.07972 and the published modeling_hf_nomic_bert.py (NomicRouter, NomicExperts): every second layer has
    experts, their weights are not made to sum to one, and one bias is added to their sum."""

    def __init__(self, shape: int) -> None:
        super().__init__(shape)
        self.experts, self.active = EXPERTS[shape]
        self.add("embeddings.word_embeddings.weight", VOCAB, self.width)
        self.add("embeddings.token_type_embeddings.weight", 1, self.width)
        self.add_norm("emb_ln")
        for layer in range(self.layers):
            stem = f"encoder.layers.{layer}."
            self.add_linear(f"{stem}attn.Wqkv", 3 * self.width, self.width)
            self.add_linear(f"{stem}attn.out_proj", self.width, self.width)
            self.add_norm(f"{stem}norm1")
            self.add_norm(f"{stem}norm2")
            if layer % 2 == 0:
                self.add_linear(f"{stem}mlp.fc1", self.hidden, self.width)
                self.add_linear(f"{stem}mlp.fc2", self.width, self.hidden)
                continue
            self.add(f"{stem}mlp.router.layer.weight", self.experts, self.width)
            for name in ("w1", "w2"):
                self.add(f"{stem}mlp.experts.mlp.{name}", self.experts * self.hidden, self.width)
            self.add(f"{stem}mlp.experts.bias", self.width)
        self.config = {"model_type": "nomic_bert", "n_embd": self.width, "n_head": self.heads, "n_layer": self.layers}
        self.config |= {"n_inner": self.hidden, "n_positions": 2048, "max_trained_positions": 2048, "ffn_div": 1}
        self.config |= {"layer_norm_epsilon": EPS, "rotary_emb_base": BASE, "vocab_size": VOCAB, "type_vocab_size": 1}
        self.config |= {"activation_function": "gelu", "prenorm": False, "causal": False, "rotary_emb_fraction": 1.0}
        self.config |= dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True)
        self.config |= {"moe_every_n_layers": 2, "num_experts": self.experts, "moe_top_k": self.active}
        self.config |= {"moe_normalize_expert_weights": False, "expert_choice_router": False, "num_shared_experts": 0}
        self.config |= {"moe_impl": "megablocks", "rotary_scaling_factor": None, "rotary_emb_scale_base": None}

    def states(self, ids: list[int]) -> Any:
        x = self.at("embeddings.word_embeddings.weight")[ids] + self.at("embeddings.token_type_embeddings.weight")[0]
        x = self.norm(x, "emb_ln")
        for layer in range(self.layers):
            stem = f"encoder.layers.{layer}."
            q, k, v = (self.split(part) for part in self.linear(x, f"{stem}attn.Wqkv").chunk(3, dim=-1))
            q, k = rotated(q), rotated(k)
            p = torch.softmax(q @ k.transpose(1, 2) / (self.width / self.heads) ** 0.5, dim=-1)
            mixed = (p @ v).transpose(0, 1).reshape(x.shape)
            x = self.norm(x + self.linear(mixed, f"{stem}attn.out_proj"), f"{stem}norm1")
            x = self.norm(x + self._feed_forward(x, layer, f"{stem}mlp."), f"{stem}norm2")
        return x

    def _feed_forward(self, x: Any, layer: int, stem: str) -> Any:
        if layer % 2 == 0:
            return self.linear(F.gelu(self.linear(x, f"{stem}fc1")), f"{stem}fc2")
        weights = torch.softmax(self.linear(x, f"{stem}router.layer"), dim=-1)
        shares, chosen = torch.topk(weights, self.active, dim=-1)
        shape = (self.experts, self.hidden, self.width)
        first, second = (self.at(f"{stem}experts.mlp.{name}").view(shape) for name in ("w1", "w2"))
        rows = []
        for row, own, experts in zip(x, shares, chosen, strict=True):
            rows.append(sum(s * (F.gelu(first[e] @ row) @ second[e]) for s, e in zip(own, experts, strict=True)))
        return torch.stack(rows) + self.at(f"{stem}experts.bias")


def rotated(x: Any) -> Any:
    """Rope of halves; x is (heads, tokens, head_dim)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * BASE ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


MODELS: dict[str, Callable[[int], Encoder]] = {"jina_bert": JinaBert, "nomic_moe": NomicMoe}
FLASH_NAMES = {
    "embeddings.LayerNorm": "emb_ln",
    "encoder.layer.": "encoder.layers.",
    "attention.output.dense": "mixer.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "output.LayerNorm": "norm2",
    "output.dense": "mlp.fc2",
    "self_attn.o_proj": "mixer.out_proj",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}


def flash_layout(folder: Path, target: Path, *, num_adapters: int = 0) -> Path:
    """The same XLM-RoBERTa in the layout of jina-embeddings-v3 and jina-reranker-v2: Q, K and V in one matrix, other
    names; with adapters beside each matrix, as of the first."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    found: Tensors = {}
    for old in [name for name in tensors if ".query." in name or ".q_proj." in name]:
        parts = [
            tensors.pop(old.replace("query", p).replace("q_proj", f"{p[0]}_proj")) for p in ("query", "key", "value")
        ]
        stem = old.split(".attention.")[0].split(".self_attn.")[0]
        found[f"{stem}.mixer.Wqkv.{old.rpartition('.')[2]}"] = np.concatenate(parts)
    rng = np.random.default_rng(9)
    for old, values in (found | tensors).items():
        found.pop(old, None)
        name = old.replace("roberta.", "")
        name = f"encoder.{name}" if name.startswith("layers.") else name
        for theirs, ours in FLASH_NAMES.items():
            name = name.replace(theirs, ours)
        if num_adapters and name.endswith("weight") and "norm" not in name and values.ndim == 2:
            stem = f"{name.removesuffix('weight')}parametrizations.weight."
            found[f"roberta.{stem}original"] = values
            for side, size in (("A", values.shape[1]), ("B", values.shape[0])):
                found[f"roberta.{stem}0.lora_{side}"] = rng.standard_normal((num_adapters, size, 4)).astype(np.float32)
        else:
            found[name if name.startswith("classifier") else f"roberta.{name}"] = values
    save_file(found, target / "model.safetensors")
    if "rope_parameters" in config:
        config |= {"position_embedding_type": "rotary", "rotary_emb_base": config.pop("rope_parameters")["rope_theta"]}
    config |= {"model_type": "xlm-roberta", "use_flash_attn": True, "emb_pooler": None}
    if num_adapters:
        config |= {"lora_adaptations": ["a", "b"], "lora_alpha": 1, "lora_rank": 4, "lora_main_params_trainable": False}
    (target / "config.json").write_text(json.dumps(config))
    return target


GGUF_KEYS = {
    **{"hidden_size": "embedding_length", "n_embd": "embedding_length"},
    **{"num_hidden_layers": "block_count", "n_layer": "block_count"},
    **{"num_attention_heads": "attention.head_count", "n_head": "attention.head_count"},
    **{"intermediate_size": "feed_forward_length", "n_inner": "feed_forward_length"},
    **{"layer_norm_eps": "attention.layer_norm_epsilon", "layer_norm_epsilon": "attention.layer_norm_epsilon"},
    **{"max_position_embeddings": "context_length", "n_positions": "context_length"},
    **{"num_experts": "expert_count", "moe_top_k": "expert_used_count", "moe_every_n_layers": "moe_every_n_layers"},
    "rotary_emb_base": "rope.freq_base",
}


def authors_gguf(folder: Path, arch: str) -> Path:
    """The GGUF file that llama.cpp's converter makes of such a folder."""
    config = json.loads((folder / "config.json").read_text())
    number = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    facts = {ours: config[theirs] for theirs, ours in GGUF_KEYS.items() if config.get(theirs) is not None}
    names = gguf.get_tensor_name_map(number, facts["block_count"])
    found: Tensors = {}
    for theirs, stored in load_file(folder / "model.safetensors").items():
        values = stored
        name = theirs.removeprefix("roberta.").replace(".parametrizations.weight.original", ".weight")
        if "lora_" in name or name.startswith("pooler"):
            continue
        if "mlp.experts.mlp" in name:
            stacked = values.reshape(config["num_experts"], config["n_inner"], config["n_embd"])
            name, values = f"{name}.weight", stacked.swapaxes(1, 2) if name.endswith("w2") else stacked
        if "mlp.experts.bias" in name:
            continue
        canonical = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert canonical is not None, name
        found[canonical] = np.ascontiguousarray(values)
    stored = {name: Stored.quantized(values, TensorType.F32) for name, values in found.items()}
    facts |= {"attention.causal": False, "pooling_type": 1}
    path = folder.with_suffix(".gguf")
    write_gguf(path, {"general.architecture": arch} | {f"{arch}.{key}": one for key, one in facts.items()}, stored)
    return path
