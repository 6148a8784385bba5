"""What a model file says of its rope: config.json's entries, old spelling or new, and the kind of scaling.

An entry that would change the frequencies and that no code reads is refused. rope.py makes the frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarn.checks import short
from kvarn.models.config.defaults import ROPES
from kvarn.models.hparams import HParams

# What config.json may say about each kind of scaling; anything else in its rope entries is refused.
COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
SCALING_KEYS: dict[str, frozenset[str]] = {
    "none": frozenset({"factor"}),  # no scaling, whatever the factor
    "dynamic": frozenset({"factor"}),  # scales beyond max_position_embeddings, where no model is run
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor"}),
    "proportional": frozenset({"factor"}),
    "ntk_alpha": frozenset({"factor", "alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),
}
# Read by an architecture itself.
_OF_IMAGES = frozenset({"mrope_section", "mrope_interleaved"})
OWN_KEYS = {
    "phimoe": frozenset({"short_mscale", "long_mscale"}),
    "ministral3": frozenset({"llama_4_scaling_beta", "max_position_embeddings"}),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text"), _OF_IMAGES),
    "qwen3_vl_moe_text": _OF_IMAGES,
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _OF_IMAGES),
}
BY_KIND = (
    *("gemma3", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "diffusion_gemma_text"),
    *("olmo3", "lfm3"),
)  # model types whose windowed layers may have a rope of their own
PROPORTIONAL = ("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text", "lfm3")
# Entries that transformers has no use for, whatever their value; vLLM and models' own code may have.
UNUSED_KEYS = {"yarn": frozenset({"attn_factor", "extrapolation_factor"})}
# As which llama.cpp's converter writes them, attention_factor too. It reads them for no architecture that is run here.
UNUSED_GGUF_KEYS = ("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor")
RENAMED = {"default": "none", "su": "longrope", "mrope": "none"}


def rope_entries(hparams: HParams, kind: str, context: int) -> Mapping[str, Any] | None:
    """Gather config.json's rope entries, old spelling or new, flat or by kind of layer. None for GGUF."""
    if hparams.is_gguf:
        return None
    scaling, parameters = (_entry(hparams, key) for key in ("rope_scaling", "rope_parameters"))
    is_by_kind = hparams.architecture in BY_KIND
    if is_by_kind and parameters and not parameters.keys() & {"full_attention", "sliding_attention"}:
        raise hparams.format_error(f"rope_parameters has {short(sorted(parameters))}; expected full_attention")
    nested = parameters.get(kind) if is_by_kind else None
    base = "rope_local_base_freq" if kind == "sliding_attention" else "rope_theta"
    table = {
        "rope_theta": hparams.raw(None, base, "rotary_emb_base"),
        "partial_rotary_factor": hparams.raw(None, "partial_rotary_factor", "rotary_pct"),
    }
    if isinstance(nested, Mapping):
        table |= {**nested, **(scaling if kind == "full_attention" else {})}
    else:
        table |= scaling or parameters
    original = hparams.raw(None, "original_max_position_embeddings")
    if original is not None and not isinstance(nested, Mapping):
        table["original_max_position_embeddings"] = original  # as transformers does, whatever the inner one says
    table.setdefault("original_max_position_embeddings", context)
    return {key: value for key, value in table.items() if value is not None}


def _entry(hparams: HParams, key: str) -> Mapping[str, Any]:
    found = hparams.raw(None, key)
    if found is None and key == "rope_parameters":
        found = ROPES.get(hparams.architecture)
    if not isinstance(found or {}, Mapping):
        raise hparams.format_error(f"{key} is {short(found)}; expected an object")
    return found or {}


def scaling_kind(hparams: HParams, table: Mapping[str, Any] | None) -> str:
    """How the frequencies are scaled, by the name that SCALING_KEYS has for it."""
    known: tuple[str, ...] = ("none", "linear", "yarn", "longrope")
    if table is None:
        name = _gguf_scaling(hparams)
    else:
        name, known = table.get("rope_type", table.get("type")), tuple(SCALING_KEYS)
        name = RENAMED.get(name, name) if isinstance(name, str) else name
        if name == "yarn" and hparams.architecture == "phi3":
            name = "longrope"  # what this model type meant by it
        if name == "dynamic" and table.get("alpha") and hparams.architecture.startswith("hunyuan"):
            name = "ntk_alpha"
    name = "none" if name is None else name
    if name == "proportional" and hparams.architecture not in PROPORTIONAL:
        known = tuple(one for one in known if one != name)
    if name not in known:
        raise hparams.unsupported(
            f"rope scaling {short(name)} is unknown; known are {', '.join(known)}", "rope.scaling.type"
        )
    if table is not None:
        _refuse_unknown(hparams, str(name), table)
    return str(name)


def _gguf_scaling(hparams: HParams) -> Any:
    if hparams.has_tensor("rope_factors_long.weight") or hparams.has_tensor("rope_factors_short.weight"):
        hparams.raw("rope.scaling.type")
        return "longrope"
    name = hparams.raw("rope.scaling.type")
    factor = hparams.number("rope_factor", default=None)
    hparams.raw("rope.scaling.original_context_length")  # has no effect unless the kind of scaling uses it
    for key in UNUSED_GGUF_KEYS:
        if (given := hparams.raw(key)) not in (None, 1.0):
            hparams.notes[f"{key} = {short(given)} has no effect, as in llama.cpp"] = None
    return "linear" if name is None and factor is not None else name  # the meaning of a factor without a type


def _refuse_unknown(hparams: HParams, kind: str, table: Mapping[str, Any]) -> None:
    unused = UNUSED_KEYS.get(kind, frozenset()) & table.keys()
    own = OWN_KEYS.get(hparams.architecture, frozenset())
    unknown = sorted(table.keys() - COMMON_KEYS - {"finetuned"} - SCALING_KEYS[kind] - unused - own)
    for key in sorted(unused):
        hparams.notes[f"rope scaling {kind!r}: {key} = {short(table[key])} has no effect, as in transformers"] = None
    if unknown:
        listed = ", ".join(f"{key} = {short(table[key])}" for key in unknown[:4])
        raise hparams.unsupported(f"rope scaling {kind!r} is changed by {listed}", *unknown)
