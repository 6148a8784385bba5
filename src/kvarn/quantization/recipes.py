"""Mixes of types by llama.cpp's names: which tensor gets which type. Pure policy over names, shapes and layers.

A mix has a base type; the output matrix and, in some layers, attn_v, attn_output and ffn_down get more bits. A type
whose blocks do not fit a tensor's rows falls back to one of at least as many bits, as in llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, overload

from kvarn.checks import check_parameter
from kvarn.formats.weights import TensorInfo, TensorType
from kvarn.quantization.fp8.scheme import FP8Scheme
from kvarn.quantization.storage_only.types import StorageOnlyType, WrittenType

T, S = TensorType, StorageOnlyType
FLOATS: Final = (T.F32, T.F16, T.BF16)

# name -> base type; Q3_K, Q4_K and Q5_K mean the medium ones, as in llama-quantize
MIXES: Final[Mapping[str, WrittenType]] = {
    **{type.name: type for type in (*FLOATS, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q6_K, T.IQ4_NL)},
    **{"Q2_K_S": T.Q2_K, "Q3_K_S": T.Q3_K, "Q3_K_M": T.Q3_K, "Q3_K_L": T.Q3_K},
    **{"Q4_K_S": T.Q4_K, "Q4_K_M": T.Q4_K, "Q5_K_S": T.Q5_K, "Q5_K_M": T.Q5_K},
    **{"IQ4_XS": S.IQ4_XS, "MXFP4": S.MXFP4, "MXFP4_MOE": S.MXFP4},
}
ALIASES: Final = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
# general.file_type
FILE_TYPES: Final = {
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11},
    **{"Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18},
    **{"Q2_K_S": 21, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32, "MXFP4": 38, "MXFP4_MOE": 38},
}
# For rows that are no multiple of 256 values.
FALLBACKS: Final[Mapping[WrittenType, TensorType]] = {
    **{T.Q2_K: T.Q4_0, T.Q3_K: T.Q4_0, T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0},
    S.IQ4_XS: T.IQ4_NL,
}
UNQUANTIZED = re.compile(
    r"(_norm|ffn_gate_inp|position_embd|token_types|ssm_conv1d|shortconv\.conv|per_layer_model_proj)\.weight$|altup|laurel"
)
EIGHT_EXPERTS_WIDE: Final = ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M")


@dataclass(frozen=True, slots=True)
class RecipeModel:
    """What a recipe looks at beside the tensor itself."""

    num_layers: int
    queries_per_kv_head: int
    num_experts: int
    is_tied: bool


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Which layer of how many; has_imatrix: whether errors are weighed."""

    layer: int
    num_layers: int
    has_imatrix: bool
    queries_per_kv_head: int


def gets_more_bits(layer: int, num_layers: int) -> bool:
    """llama.cpp's use_more_bits: the first and last eighth, and every third between."""
    first, last = num_layers // 8, 7 * num_layers // 8
    return layer < first or layer >= last or (layer - first) % 3 == 2


def mix_name(name: str) -> str:
    """The canonical name of a mix or of an FP8 scheme; unknown ones are refused with those there are."""
    check_parameter.instance("type", name, str, "the name of a type or mix such as Q4_K_M, or a kvarn.SizeTarget")
    upper = name.upper()
    found, known = ALIASES.get(upper, upper), (*MIXES, *FP8Scheme.__members__)
    check_parameter.one_of("type", found if found in known else name, known)
    return found


def is_quantizable(info: TensorInfo) -> bool:
    """Whether a recipe touches a tensor: matrices, but no norms, routers, position tables and convolutions."""
    return len(info.shape) >= 2 and info.name.endswith(".weight") and UNQUANTIZED.search(info.name) is None


def wanted_type(mix: str, info: TensorInfo, model: RecipeModel, *, has_imatrix: bool) -> WrittenType:
    """The type a mix gives a tensor, before its rows are looked at."""
    base = MIXES[mix]
    if base in FLOATS:
        return base
    if mix == "MXFP4_MOE" and "_exps." not in info.name:
        return T.Q8_0
    if info.name == ("token_embd.weight" if model.is_tied else "output.weight"):
        if info.shape[-1] % T.Q6_K.block_values:
            return T.Q8_0
        return base if base is T.Q8_0 else T.Q6_K
    match = re.match(r"blk\.([0-9]{1,4})\.(\w+?)(?:_exps)?\.weight$", info.name)
    if match is None:
        return base
    if model.num_experts == 8 and match[2] in ("attn_k", "attn_v"):
        return T.Q8_0
    if model.num_experts == 8 and match[2] == "attn_output":
        return T.Q5_K if mix in EIGHT_EXPERTS_WIDE else base
    place = TensorPlace(int(match[1]), model.num_layers, has_imatrix, model.queries_per_kv_head)
    rule = RULES.get(match[2])
    return base if rule is None else rule(mix, place) or base


@overload
def fitting_type(type: TensorType, columns: int) -> TensorType: ...
@overload
def fitting_type(type: WrittenType, columns: int) -> WrittenType: ...
def fitting_type(type: WrittenType, columns: int) -> WrittenType:
    """The type itself where its blocks fit rows of so many values, else what stands in for it."""
    while columns % type.block_values:
        type = FALLBACKS.get(type, T.F16)
    return type


def _attn_v(mix: str, place: TensorPlace) -> TensorType | None:
    shares = place.queries_per_kv_head >= 4
    if mix == "Q2_K":
        return T.Q4_K if shares else T.Q3_K
    if mix == "Q2_K_S":
        return T.Q4_K if shares else None
    if mix == "Q3_K_M":
        return T.Q5_K if place.layer < 2 else T.Q4_K
    if mix in ("Q4_K_M", "Q5_K_M"):
        return T.Q6_K if gets_more_bits(place.layer, place.num_layers) else None
    is_first = mix == "Q4_K_S" and place.layer < 4
    return T.Q5_K if is_first or mix == "Q3_K_L" or (mix in ("IQ4_NL", "IQ4_XS") and shares) else None


def _ffn_down(mix: str, place: TensorPlace) -> TensorType | None:
    is_first = place.layer < place.num_layers // 8
    fixed = {"Q2_K": T.Q3_K, "Q3_K_L": T.Q5_K}
    if mix in fixed:
        return fixed[mix]
    if mix == "Q3_K_M":
        return T.Q5_K if place.layer < place.num_layers // 16 else T.Q4_K
    if mix in ("Q4_K_M", "Q5_K_M"):
        return T.Q6_K if gets_more_bits(place.layer, place.num_layers) else None
    if not is_first:
        return None
    with_imatrix = {"Q4_0": T.Q4_1, "Q5_0": T.Q5_1}
    if mix in with_imatrix:
        return with_imatrix[mix] if place.has_imatrix else None
    if mix in ("IQ4_NL", "IQ4_XS"):
        return None if place.has_imatrix else T.Q5_K
    return {"Q2_K_S": T.Q4_K, "Q4_K_S": T.Q5_K}.get(mix)


def _attn_output(mix: str, _: TensorPlace) -> TensorType | None:
    return {"Q2_K": T.Q3_K, "Q3_K_M": T.Q4_K, "Q3_K_L": T.Q5_K}.get(mix)


RULES: Final[Mapping[str, Callable[[str, TensorPlace], TensorType | None]]] = {
    "attn_v": _attn_v,
    "attn_qkv": _attn_v,
    "ffn_down": _ffn_down,
    "attn_output": _attn_output,
}
