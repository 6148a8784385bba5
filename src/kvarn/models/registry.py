"""Which architectures exist, under the names GGUF and Hugging Face give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvarn.errors import FormatError, UnsupportedModel
from kvarn.formats.weights import WeightSource
from kvarn.models.architectures import (
    afmoe,
    arcee,
    bloom,
    cohere,
    deepseek,
    dots1,
    ernie4_5,
    exaone4,
    exaone_moe,
    falcon,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    glm4,
    glm4_moe,
    gpt2,
    gpt_bigcode,
    gpt_neo,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_hybrid,
    hunyuan,
    hy_v3,
    lfm2,
    lfm3,
    llama,
    llama4,
    mamba,
    mamba2,
    minicpm3,
    minimax_m2,
    ministral3,
    nemotron_h,
    olmo2,
    olmoe,
    opt,
    phi,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_next,
    qwen_vl,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from kvarn.models.architectures.entry import Architecture
from kvarn.models.config.families import FAMILIES
from kvarn.models.diffusion.architectures import DIFFUSION
from kvarn.models.encoders.architectures import ENCODERS
from kvarn.models.hparam_names import HPARAMS
from kvarn.models.hparams import text_config
from kvarn.models.tensors.fused import without_gate_bias

# The text parts of models with several, where text_config does not name its own model type.
TEXT_PARTS: Final = {
    **{
        name: f"{name}_text"
        for name in ("llama4", "gemma3n", "gemma4", "gemma4_unified", "diffusion_gemma", "qwen3_vl", "qwen3_vl_moe")
    },
    **{"mistral3": "mistral", "internvl": "qwen2", "smolvlm": "llama", "idefics3": "llama", "lfm2_vl": "lfm2"},
    **{"llava": "llama", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"},
}
SECOND_NORM: Final = {"post_attention_norm": "ffn_norm"}  # by its place, though it stands before the feed-forward
ARCHITECTURES: Final = (
    Architecture(
        "Llama, Mistral, Mixtral, SmolLM2, InternLM3",
        ("llama",),
        ("llama", "mistral", "mixtral", "internlm3"),
        llama.describe,
    ),
    Architecture("Helium", (), ("helium",), llama.describe_interleaved),
    Architecture("dots.llm1", ("dots1",), ("dots1",), dots1.describe),
    Architecture("Llama 4 (text)", ("llama4",), ("llama4_text",), llama4.describe, "turned", split=llama4.separate),
    Architecture("Phi-3.5-MoE, Phi-mini-MoE", ("phimoe",), ("phimoe",), phimoe.describe),
    Architecture("Qwen2, Qwen2.5; Open-dCoder", ("qwen2",), ("qwen2",), qwen2.describe),
    Architecture("Qwen3, dense and with experts", ("qwen3", "qwen3moe"), ("qwen3", "qwen3_moe"), qwen3.describe),
    Architecture("Gemma 2", ("gemma2",), ("gemma2",), gemma2.describe, "sandwich", hf_norm_offset=1.0),
    Architecture(
        "Gemma 3 (text), EmbeddingGemma",
        ("gemma3", "gemma-embedding"),
        ("gemma3_text", "gemma3"),
        gemma3.describe,
        "sandwich",
        hf_norm_offset=1.0,
    ),
    Architecture(
        "Gemma 3n (text)",
        ("gemma3n",),
        ("gemma3n_text",),
        gemma3n.describe,
        "sandwich",
        split=gemma3n.separate,
    ),
    Architecture(
        "Gemma 4 (text), dense and with experts",
        ("gemma4",),
        ("gemma4_text", "gemma4_unified_text"),
        gemma4.describe,
        "sandwich",
        split=gemma4.separate,
    ),
    Architecture("Phi-3, Phi-4", ("phi3",), ("phi3",), phi3.describe),
    Architecture("SmolLM3", ("smollm3",), ("smollm3",), smollm3.describe),
    Architecture("Seed-OSS", ("seed_oss",), ("seed_oss",), seed_oss.describe, gguf_names=SECOND_NORM),
    Architecture("Gemma", ("gemma",), ("gemma",), gemma.describe, hf_norm_offset=1.0),
    Architecture("OLMo 2, OLMo 3", ("olmo2",), ("olmo2", "olmo3"), olmo2.describe, "sandwich"),
    Architecture("OLMoE", ("olmoe",), ("olmoe",), olmoe.describe),
    Architecture(
        "Granite 3, dense and with experts",
        ("granite", "granitemoe"),
        ("granite", "granitemoe", "granitemoeshared"),
        granite.describe,
        split=granite_hybrid.cut_shared,
    ),
    Architecture("GLM-4 (0414)", ("glm4",), ("glm4",), glm4.describe),
    Architecture("EXAONE 4", ("exaone4",), ("exaone4",), exaone4.describe, "sandwich"),
    Architecture(
        "ERNIE 4.5, dense and with experts",
        ("ernie4_5", "ernie4_5-moe"),
        ("ernie4_5", "ernie4_5_moe"),
        ernie4_5.describe,
        split=ernie4_5.flatten_bias,
    ),
    Architecture(
        "HunYuan, dense and with experts",
        ("hunyuan-dense", "hunyuan-moe"),
        ("hunyuan_v1_dense", "hunyuan_v1_moe"),
        hunyuan.describe,
    ),
    Architecture("Command R, Command R7B", ("command-r", "cohere2"), ("cohere", "cohere2"), cohere.describe),
    Architecture("StarCoder2", ("starcoder2",), ("starcoder2",), starcoder2.describe),
    Architecture("StableLM", ("stablelm",), ("stablelm",), stablelm.describe),
    Architecture("Phi-1, Phi-1.5, Phi-2", ("phi2",), ("phi",), phi.describe),
    Architecture("Ministral, Ministral 3", ("mistral3",), ("ministral", "ministral3"), ministral3.describe),
    Architecture(
        "Qwen2-VL, Qwen2.5-VL (text)",
        ("qwen2vl",),
        ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        qwen_vl.describe_2,
    ),
    Architecture(
        "Qwen3-VL (text), dense and with experts",
        ("qwen3vl", "qwen3vlmoe"),
        ("qwen3_vl_text", "qwen3_vl_moe_text"),
        qwen_vl.describe_3,
        "turned",
        split=qwen_vl.separate,
    ),
    Architecture("Arcee AFM", ("arcee",), ("arcee",), arcee.describe_arcee),
    Architecture("Nemotron, Minitron", ("nemotron",), ("nemotron",), arcee.describe_nemotron, hf_norm_offset=1.0),
    Architecture("GPT-NeoX, Pythia", ("gptneox",), ("gpt_neox",), gpt_neox.describe, split=gpt_neox.split_heads),
    Architecture("Falcon (7B, 40B, 180B)", ("falcon",), ("falcon",), falcon.describe, split=falcon.separate),
    Architecture("GPT-2", ("gpt2",), ("gpt2",), gpt2.describe, split=gpt2.transpose),
    Architecture("GPT-Neo", (), ("gpt_neo",), gpt_neo.describe),
    Architecture("GPT-J", (), ("gptj",), gptj.describe),
    Architecture(
        "StarCoder, SantaCoder", ("starcoder",), ("gpt_bigcode",), gpt_bigcode.describe, split=gpt_bigcode.separate
    ),
    Architecture("BLOOM, BLOOMZ", ("bloom",), ("bloom",), bloom.describe, split=gpt_neox.split_heads),
    Architecture("OPT, Galactica", (), ("opt",), opt.describe, split=opt.drop_position_offset),
    Architecture(
        "GLM-4.5, Solar Open",
        ("glm4moe",),
        ("glm4_moe", "solar_open"),
        glm4_moe.describe,
        split=glm4_moe.drop_draft_layers,
        gguf_names=SECOND_NORM,
    ),
    Architecture(
        "gpt-oss",
        ("gpt-oss",),
        ("gpt_oss",),
        gpt_oss.describe,
        "turned",
        split=gpt_oss.separate_experts,
        gguf_names=SECOND_NORM,
    ),
    Architecture(
        "DeepSeek-V2, V3, R1; Kimi K2; GLM-4.7-Flash",
        ("deepseek2",),
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"),
        deepseek.describe,
        split=deepseek.separate,
    ),
    Architecture("MiniCPM3", ("minicpm3",), ("minicpm3",), minicpm3.describe, split=deepseek.cut_latents),
    Architecture("MiniMax-M2", ("minimax-m2",), ("minimax_m2",), minimax_m2.describe),
    Architecture("Qwen1.5-MoE, Qwen2-MoE", ("qwen2moe",), ("qwen2_moe",), qwen2_moe.describe),
    Architecture(
        "Qwen3-Next, Qwen3.5 (text), dense and with experts",
        ("qwen3next", "qwen35", "qwen35moe"),
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        qwen3_next.describe,
        hf_norm_offset=1.0,
        split=qwen3_next.separate,
        gguf_names=SECOND_NORM,
    ),
    Architecture(
        "LFM2, dense and with experts", ("lfm2", "lfm2moe"), ("lfm2", "lfm2_moe"), lfm2.describe, split=lfm2.rename
    ),
    Architecture("LFM3", (), ("lfm3",), lfm3.describe, split=lfm3.repeat_gates),
    Architecture("Trinity (AFMoE)", ("afmoe",), ("afmoe",), afmoe.describe, "sandwich", split=without_gate_bias),
    Architecture("K-EXAONE", ("exaone-moe",), ("exaone_moe",), exaone_moe.describe, split=glm4_moe.drop_draft_layers),
    Architecture("Hunyuan 3", ("hy_v3",), ("hy_v3",), hy_v3.describe, split=hy_v3.separate),
    Architecture("HyperCLOVA X", (), ("hyperclovax",), granite.describe_hyperclova),
    Architecture("GLM-4 (9B), GLM-Edge", ("chatglm",), ("glm",), glm4.describe_first),
    Architecture("Falcon-H1", ("falcon-h1",), ("falcon_h1",), falcon_h1.describe, split=falcon_h1.fold),
    Architecture(
        "Granite 4, Bamba: dense and with experts",
        ("granitehybrid",),
        ("granitemoehybrid", "bamba"),
        granite_hybrid.describe,
        split=granite_hybrid.separate,
    ),
    Architecture(
        "Nemotron-H, Nemotron 3 Nano: dense and with experts",
        ("nemotron_h", "nemotron_h_moe"),
        ("nemotron_h",),
        nemotron_h.describe,
        split=nemotron_h.rename,
    ),
    Architecture(
        "Mamba, Falcon-Mamba", ("mamba",), ("mamba", "falcon_mamba"), mamba.describe, split=mamba2.flatten_states
    ),
    Architecture("Mamba-2, Codestral Mamba", ("mamba2",), ("mamba2",), mamba2.describe, split=mamba2.flatten_states),
    *ENCODERS,
    *DIFFUSION,
)


OTHER_KINDS: dict[Any, str] = {  # general.type of GGUF files
    "imatrix": "an importance matrix for kvarn quantize --imatrix",
    "adapter": "an adapter for --lora",
    "mmproj": "the part of a model that reads images",
    "vocab": "a vocabulary",
}


def find_architecture(source: WeightSource) -> tuple[str, Architecture]:
    """Return the name of a model's architecture and the architecture, or refuse it with the names known."""
    hf: Mapping[str, Any] | None = source.metadata.get("hf")
    key = "general.architecture" if hf is None else "model_type"
    name = source.metadata.get(key) if hf is None else text_config(hf).get(key, hf.get(key))
    name = TEXT_PARTS.get(name, name) if isinstance(name, str) and hf is not None and "text_config" in hf else name
    if not isinstance(name, str):
        if (kind := source.metadata.get("general.type")) in OTHER_KINDS:
            raise FormatError(f"this file is {OTHER_KINDS[kind]}, no model; give the model's file", file=source.path)
        raise FormatError(f"{key} is {name!r}; expected the name of an architecture", file=source.path)
    known = {n: entry for entry in ARCHITECTURES for n in (entry.gguf if hf is None else entry.hf)}
    if name not in known:
        raise UnsupportedModel(
            f"architecture {name[:60]!r} is unknown; known are {', '.join(sorted(known))}", fields=(key,)
        )
    return name, known[name]


def supported_families() -> list[tuple[str, str, str, str, str]]:
    """List what can be run, by title: as family_row() has it."""
    return sorted(map(family_row, ARCHITECTURES), key=lambda row: row[0].lower())


def family_row(one: Architecture) -> tuple[str, str, str, str, str]:
    """Title, GGUF architectures, model types of config.json, context, oracle of the tests.

    The context is that of a folder whose config.json has none; GGUF files always say theirs.
    """
    return one.title, ", ".join(one.gguf), ", ".join(one.hf), _context(one), one.oracle


def _context(architecture: Architecture) -> str:
    given = [FAMILIES[name].get(key) for name in architecture.hf for key in HPARAMS["context_length"].hf]
    numbers = sorted({number for number in given if isinstance(number, int)})
    return " to ".join(f"{number:,}" for number in dict.fromkeys((numbers[0], numbers[-1]))) if numbers else ""
