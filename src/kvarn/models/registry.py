"""Which architectures exist, under the names GGUF and Hugging Face give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.hf_names import Dialect
from kvarn.formats.tensor_view import WeightView
from kvarn.formats.weights import WeightSource
from kvarn.models.architectures import (
    bert,
    dream,
    gemma2,
    gemma3,
    llada,
    llada_moe,
    llama,
    phi3,
    qwen2,
    qwen3,
    sdar,
)
from kvarn.models.hparams import HParams, text_config
from kvarn.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture is recognised and described.

    hf_norm_offset: what safetensors subtract from norm weights.
    """

    gguf: tuple[str, ...]
    hf: tuple[str, ...]
    describe: Callable[[HParams], ModelSpec]
    dialect: Dialect = "decoder"
    hf_norm_offset: float = 0.0
    split: Callable[[ModelSpec, WeightView], WeightView] | None = None


ARCHITECTURES: Final = (
    Architecture(("llama",), ("llama", "mistral", "mixtral"), llama.describe),
    Architecture(("qwen2",), ("qwen2",), qwen2.describe),
    Architecture(("qwen3", "qwen3moe"), ("qwen3", "qwen3_moe"), qwen3.describe),
    Architecture(("gemma2",), ("gemma2",), gemma2.describe, "sandwich", hf_norm_offset=1.0),
    Architecture(("gemma3",), ("gemma3_text", "gemma3"), gemma3.describe, "sandwich", hf_norm_offset=1.0),
    Architecture(("phi3",), ("phi3",), phi3.describe, split=phi3.split_fused),
    Architecture(("bert",), ("bert",), bert.describe, "encoder"),
    Architecture(("llada",), ("llada",), llada.describe),
    Architecture(("llada-moe",), ("llada_moe",), llada_moe.describe),
    Architecture(("dream",), ("Dream", "dream"), dream.describe),
    Architecture(("sdar",), ("sdar", "sdar_moe"), sdar.describe),
)


def find_architecture(source: WeightSource) -> tuple[str, Architecture]:
    """Return the name of a model's architecture and the architecture, or refuse it with the names known."""
    hf: Mapping[str, Any] | None = source.metadata.get("hf")
    key = "general.architecture" if hf is None else "model_type"
    name = source.metadata.get(key) if hf is None else text_config(hf).get(key, hf.get(key))
    if not isinstance(name, str):
        raise FormatError(f"{key} is {name!r}; expected the name of an architecture", file=source.path)
    known = {n: entry for entry in ARCHITECTURES for n in (entry.gguf if hf is None else entry.hf)}
    if name not in known:
        raise UnsupportedModel(
            f"architecture {name[:60]!r} is unknown; known are {', '.join(sorted(known))}", fields=(key,)
        )
    return name, known[name]
