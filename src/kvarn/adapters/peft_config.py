"""adapter_config.json of PEFT: what of it is honoured, and what is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvarn.checks import short
from kvarn.errors import FormatError, UnsupportedModel

# Read below, or without effect on what is computed.
KNOWN = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "fan_in_fan_out"}
    | {"base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version"}
    | {"lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
    | {"init_lora_weights", "megatron_core", "loftq_config", "eva_config", "runtime_config", "qalora_group_size"}
)
# Fields that change the arithmetic in ways nobody has written here, with what they are called.
REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules beside the pairs",
    "trainable_token_indices": "changed tokens",
    "layer_replication": "repeated layers",
    "lora_bias": "biases of the pairs",
    "target_parameters": "parameters that are no modules, such as experts",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA",
    "ensure_weight_tying": "one pair for embedding and head",
    "megatron_config": "Megatron's parallel layers",
    "corda_config": "an initialisation that changes the base",
    "arrow_config": "routing between adapters",
}
# Others change the base's weights when training begins, so that the pair is not to the base of the file.
INITIAL_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal")
T = TypeVar("T")
_MODULE = re.compile(r"[A-Za-z0-9_.]{1,200}")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Ranks and scales by module."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    base: str | None

    def rank_of(self, module: str) -> int:
        return _matched(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) where the rank is stabilised."""
        rank, alpha = self.rank_of(module), _matched(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_config(fields: Mapping[str, Any], path: str) -> PeftConfig:
    """Take what is known, refuse the rest by name."""
    if fields.get("peft_type") != "LORA":
        raise UnsupportedModel(
            f"{path}: peft_type is {short(fields.get('peft_type'))}; LORA is what can be read", fields=("peft_type",)
        )
    _refuse(fields, path)
    return PeftConfig(
        rank=_rank(fields.get("r"), "r", path),
        alpha=_number(fields.get("lora_alpha"), "lora_alpha", path),
        is_rank_stabilised=_flag(fields, "use_rslora", path),
        ranks={key: _rank(value, "rank_pattern", path) for key, value in _pattern(fields, "rank_pattern", path)},
        alphas={key: _number(value, "alpha_pattern", path) for key, value in _pattern(fields, "alpha_pattern", path)},
        base=base if isinstance(base := fields.get("base_model_name_or_path"), str) else None,
    )


def _refuse(fields: Mapping[str, Any], path: str) -> None:
    found = [f"{name} ({what})" for name, what in REFUSED.items() if fields.get(name)]
    found += [f"{name} = {short(fields[name])}" for name in fields if name not in KNOWN | set(REFUSED) and fields[name]]
    if fields.get("bias", "none") != "none":
        found.append(f"bias = {short(fields['bias'])} (trained biases)")
    if fields.get("fan_in_fan_out"):
        found.append("fan_in_fan_out (transposed weights)")
    initial = fields.get("init_lora_weights", True)
    if not any(initial is one or (isinstance(one, str) and initial == one) for one in INITIAL_WEIGHTS):
        found.append(f"init_lora_weights = {short(initial)} (it changes the base; convert it to plain LoRA)")
    if found:
        names = tuple(one.partition(" ")[0] for one in found)
        raise UnsupportedModel(f"{path}: the adapter has {'; '.join(found)}, which is not supported", fields=names)


def _pattern(fields: Mapping[str, Any], name: str, path: str) -> list[tuple[str, Any]]:
    """Keys are names of modules or their ends; PEFT takes regular expressions, of which only such are honoured."""
    pattern = fields.get(name) or {}
    if not isinstance(pattern, dict):
        raise FormatError(f"{name} is {short(pattern)}; expected an object", file=path)
    found = []
    for key, value in pattern.items():
        module = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if not _MODULE.fullmatch(module):
            raise UnsupportedModel(f"{path}: {name} has the key {short(key)}; give names of modules", fields=(name,))
        found.append((module, value))
    return found


def _matched(pattern: Mapping[str, T], module: str, default: T) -> T:
    """The first entry whose key is the module's name or its end, as PEFT looks it up."""
    return next((value for key, value in pattern.items() if f".{module}".endswith(f".{key}")), default)


def _rank(value: object, name: str, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FormatError(f"{name} is {short(value)}; expected a rank of at least 1", file=path)
    return value


def _number(value: object, name: str, path: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise FormatError(f"{name} is {short(value)}; expected a number", file=path)
    return float(value)


def _flag(fields: Mapping[str, Any], name: str, path: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool | None):
        raise FormatError(f"{name} is {short(value)}; expected true or false", file=path)
    return bool(value)
