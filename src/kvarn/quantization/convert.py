"""A Hugging Face folder as GGUF has it: hyperparameters as metadata, Q and K in GGUF's order of rows.

Nothing is trusted to the translation alone: what was made is described anew, as a loader will, and has to be the same
model. What GGUF cannot say, or says in a way not written here, is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvarn.errors import UnsupportedModel
from kvarn.formats.weights import TensorInfo, TensorType, WeightSource, conversions
from kvarn.models.describe import Description, describe
from kvarn.models.rope import frequencies
from kvarn.models.spec import MixtureOfExperts, ModelSpec, Rope
from kvarn.quantization.convert_tokenizer import tokenizer_metadata

# model_type of config.json -> general.architecture
NAMES: Final = {
    **{"llama": "llama", "mistral": "llama", "mixtral": "llama"},
    **{"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"},
}
ROPE_FACTORS = "rope_freqs.weight"


class ConvertedFolder:
    """The weights of a folder under GGUF's names and in GGUF's order, with GGUF's metadata."""

    def __init__(self, source: WeightSource, description: Description) -> None:
        self._view = description.weights
        self.conversions = conversions(source)
        self._spec = description.spec
        self._base = _rope_base(source.metadata["hf"])
        self._is_interleaved = _architecture(source, description.spec) == "llama"
        self._factors = self._rope_factors()
        self.metadata: Mapping[str, Any] = {
            **_hyperparameters(source, description.spec, self._base),
            **tokenizer_metadata(source, description.spec.vocab_size),
        }
        self.tensors: dict[str, TensorInfo] = dict(self._view.tensors)
        if self._factors is not None:
            self.tensors[ROPE_FACTORS] = TensorInfo(ROPE_FACTORS, TensorType.F32, self._factors.shape)
        _require_same_model(description.spec, describe(self).spec, source.path)

    @property
    def path(self) -> str:
        return self._view.path

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        if name == ROPE_FACTORS and self._factors is not None:
            return self._factors.view(np.uint8)
        raw, order = self._view.raw(name), self._row_order(name)
        return raw if order is None else raw.reshape(len(order), -1)[order].reshape(-1)

    def array(self, name: str) -> npt.NDArray[np.float32]:
        if name == ROPE_FACTORS and self._factors is not None:
            return self._factors
        values, order = self._view.array(name), self._row_order(name)
        return values if order is None else values[order]

    def release_pages(self, names: Iterable[str]) -> None:
        self._view.release_pages([name for name in names if name != ROPE_FACTORS])

    def verify_unchanged(self) -> None:
        self._view.verify_unchanged()

    def close(self) -> None:
        self._view.close()

    def _row_order(self, name: str) -> npt.NDArray[np.int64] | None:
        """Folders rotate halves of a head, GGUF's llama neighbours: rows i and i + n / 2 become 2 i and 2 i + 1."""
        if not self._is_interleaved or not name.startswith("blk."):
            return None
        _, layer, kind, _ = name.split(".")
        attention = self._spec.blocks[int(layer)].attention
        heads = {"attn_q": attention.num_heads, "attn_k": attention.num_kv_heads}.get(kind)
        if heads is None:
            return None
        return np.arange(heads * attention.head_dim).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)

    def _rope_factors(self) -> npt.NDArray[np.float32] | None:
        """What the plain frequencies are divided by, where a scaling method has changed them."""
        rope = self._spec.blocks[0].attention.rope
        assert rope is not None
        plain = frequencies(self._base, 2 * len(rope.inverse_frequencies))
        factors = (plain / np.array(rope.inverse_frequencies)).astype(np.float32)
        return None if np.allclose(factors, 1, rtol=1e-6) or not self._is_interleaved else factors


def _architecture(source: WeightSource, spec: ModelSpec) -> str:
    if spec.architecture not in NAMES:
        raise UnsupportedModel(
            f"{source.path}: a folder of architecture {spec.architecture!r} cannot be written as GGUF here, those of "
            f"{', '.join(NAMES)} can; convert it with llama.cpp's convert_hf_to_gguf.py and quantise that file",
            fields=("model_type",),
        )
    return NAMES[spec.architecture]


def _rope_base(config: Mapping[str, Any]) -> float:
    nested = config.get("rope_parameters")
    value = nested.get("rope_theta") if isinstance(nested, Mapping) else None
    return float(value or config.get("rope_theta") or 10000.0)


def _hyperparameters(source: WeightSource, spec: ModelSpec, rope_base: float) -> dict[str, Any]:
    name = _architecture(source, spec)
    (attention, *_), ffn = [block.attention for block in spec.blocks], spec.blocks[0].feed_forward
    assert attention.rope is not None
    facts: dict[str, Any] = {
        "context_length": spec.context_length,
        "embedding_length": spec.width,
        "block_count": len(spec.blocks),
        "feed_forward_length": int(source.metadata["hf"].get("intermediate_size", ffn.hidden)),
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.blocks[0].norm.eps),
        "rope.dimension_count": 2 * len(attention.rope.inverse_frequencies),
        "rope.freq_base": rope_base,
        "vocab_size": spec.vocab_size,
    }
    if attention.window is not None:
        facts["attention.sliding_window"] = attention.window
    if isinstance(ffn, MixtureOfExperts):
        facts |= {"expert_count": ffn.num_experts, "expert_used_count": ffn.num_active}
        if name != "llama":  # Mixtral's experts have the feed-forward's length
            facts["expert_feed_forward_length"] = ffn.hidden
    shown = source.metadata["hf"].get("_name_or_path") or source.path.rstrip("/").rpartition("/")[2]
    general = {"general.architecture": name, "general.type": "model", "general.name": str(shown)}
    return general | {f"{name}.{key}": value for key, value in facts.items()}


def _require_same_model(wanted: ModelSpec, found: ModelSpec, path: str) -> None:
    """Refuse what came out as another model: a scaling of positions, a window or a mixture GGUF does not say so."""
    if _comparable(wanted) != _comparable(found) or not _same_ropes(wanted, found):
        raise UnsupportedModel(
            f"{path}: the model has something that is not written as GGUF here (a scaling of positions, or layers "
            "that differ); convert it with llama.cpp's convert_hf_to_gguf.py and quantise that file"
        )


def _comparable(spec: ModelSpec) -> ModelSpec:
    blocks = tuple(
        replace(
            block,
            norm=replace(block.norm, eps=float(np.float32(block.norm.eps))),
            mixer=replace(
                block.attention,
                rope=None,
                qk_norm=None
                if block.attention.qk_norm is None
                else replace(block.attention.qk_norm, eps=float(np.float32(block.attention.qk_norm.eps))),
            ),
        )
        for block in spec.blocks
    )
    norm = None if spec.output_norm is None else replace(spec.output_norm, eps=float(np.float32(spec.output_norm.eps)))
    return replace(spec, architecture="", name="", blocks=blocks, output_norm=norm)


def _same_ropes(wanted: ModelSpec, found: ModelSpec) -> bool:
    return all(_same_rope(a.attention.rope, b.attention.rope) for a, b in zip(wanted.blocks, found.blocks, strict=True))


def _same_rope(wanted: Rope | None, found: Rope | None) -> bool:
    if wanted is None or found is None:
        return wanted is found
    return (
        wanted.magnitude == found.magnitude
        and len(wanted.inverse_frequencies) == len(found.inverse_frequencies)
        and np.allclose(wanted.inverse_frequencies, found.inverse_frequencies, rtol=1e-5)
    )
