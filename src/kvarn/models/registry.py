"""Which architectures exist, under the names GGUF and Hugging Face give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.hf_names import Dialect
from kvarn.formats.tensor_view import WeightView
from kvarn.formats.weights import WeightSource
from kvarn.models.architectures import (
    arcee,
    bert,
    cohere,
    dream,
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    hunyuan,
    llada,
    llada_moe,
    llama,
    minimax_m2,
    ministral3,
    olmo2,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen_vl,
    sdar,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from kvarn.models.hparams import HParams, text_config
from kvarn.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture is recognised and described.

    hf_norm_offset: what safetensors subtract from norm weights. gguf_names: how GGUF calls some of a layer's tensors.
    """

    gguf: tuple[str, ...]
    hf: tuple[str, ...]
    describe: Callable[[HParams], ModelSpec]
    dialect: Dialect = "decoder"
    hf_norm_offset: float = 0.0
    split: Callable[[ModelSpec, WeightView], WeightView] | None = None
    gguf_names: Mapping[str, str] = field(default_factory=dict)


SECOND_NORM: Final = {"post_attention_norm": "ffn_norm"}  # by its place, though it stands before the feed-forward
ARCHITECTURES: Final = (
    Architecture(("llama",), ("llama", "mistral", "mixtral"), llama.describe),
    Architecture(("qwen2",), ("qwen2",), qwen2.describe),
    Architecture(("qwen3", "qwen3moe"), ("qwen3", "qwen3_moe"), qwen3.describe),
    Architecture(("gemma2",), ("gemma2",), gemma2.describe, "sandwich", hf_norm_offset=1.0),
    Architecture(("gemma3",), ("gemma3_text", "gemma3"), gemma3.describe, "sandwich", hf_norm_offset=1.0),
    Architecture(("phi3",), ("phi3",), phi3.describe),
    Architecture(("smollm3",), ("smollm3",), smollm3.describe),
    Architecture(("seed_oss",), ("seed_oss",), seed_oss.describe, gguf_names=SECOND_NORM),
    Architecture(("gemma",), ("gemma",), gemma.describe, hf_norm_offset=1.0),
    Architecture(("olmo2",), ("olmo2", "olmo3"), olmo2.describe, "sandwich"),
    Architecture(("granite",), ("granite",), granite.describe),
    Architecture(("glm4",), ("glm4",), glm4.describe),
    Architecture(("exaone4",), ("exaone4",), exaone4.describe, "sandwich"),
    Architecture(("ernie4_5",), ("ernie4_5",), ernie4_5.describe),
    Architecture(("hunyuan-dense",), ("hunyuan_v1_dense",), hunyuan.describe),
    Architecture(("command-r", "cohere2"), ("cohere", "cohere2"), cohere.describe),
    Architecture(("starcoder2",), ("starcoder2",), starcoder2.describe),
    Architecture(("stablelm",), ("stablelm",), stablelm.describe),
    Architecture(("phi2",), ("phi",), phi.describe),
    Architecture(("mistral3",), ("ministral", "ministral3"), ministral3.describe),
    Architecture(("qwen2vl",), ("qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), qwen_vl.describe_2),
    Architecture(("qwen3vl", "qwen3vlmoe"), ("qwen3_vl_text", "qwen3_vl_moe_text"), qwen_vl.describe_3),
    Architecture(("arcee",), ("arcee",), arcee.describe_arcee),
    Architecture(("nemotron",), ("nemotron",), arcee.describe_nemotron, hf_norm_offset=1.0),
    Architecture(("gptneox",), ("gpt_neox",), gpt_neox.describe, split=gpt_neox.split_heads),
    Architecture(("gpt2",), ("gpt2",), gpt2.describe, split=gpt2.transpose),
    Architecture(
        ("glm4moe",), ("glm4_moe",), glm4_moe.describe, split=glm4_moe.drop_draft_layers, gguf_names=SECOND_NORM
    ),
    Architecture(
        ("gpt-oss",), ("gpt_oss",), gpt_oss.describe, "turned", split=gpt_oss.separate_experts, gguf_names=SECOND_NORM
    ),
    Architecture(("minimax-m2",), ("minimax_m2",), minimax_m2.describe),
    Architecture(("qwen2moe",), ("qwen2_moe",), qwen2_moe.describe),
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
