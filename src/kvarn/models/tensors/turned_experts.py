"""Experts of folders that have them as (experts, in, out), gates and ups in one tensor, as those of a spec."""

from __future__ import annotations

import re
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvarn.errors import FormatError
from kvarn.formats.hf_names import split_gate_up
from kvarn.formats.recast_weights import FLOATS, Rearranged, RearrangedWeights
from kvarn.formats.tensor_view import ViewEntry, WeightView, renamed
from kvarn.formats.weights import TensorInfo
from kvarn.models.spec import MixtureOfExperts, ModelSpec

_EXPERTS = re.compile(
    r"^(?:language_model\.|model\.)*layers\.(\d+)\.(?:mlp|feed_forward)\.experts\.(gate_up|down)_proj$"
)


def turn_experts(spec: ModelSpec, view: WeightView, stored: Literal["turned", "either"] = "turned") -> WeightView:
    """Turn them round and take gates and ups apart. either: those that fit as they are stay so."""
    made: dict[str, Rearranged] = {}
    entries: dict[str, ViewEntry] = {}
    for name, entry in view.entries.items():
        match = _EXPERTS.match(name)
        if match is None:
            entries[name] = entry
            continue
        layer, kind = int(match.group(1)), match.group(2)
        if stored == "either" and _fits(spec, layer, kind, entry.info):
            down = f"blk.{layer}.ffn_down_exps.weight"
            is_down = kind == "down"
            entries |= {down: renamed(entry.info, down)} if is_down else split_gate_up(entry.info, f"blk.{layer}.")
            continue
        for part, half in ({"gate": 0, "up": 1} if kind == "gate_up" else {"down": None}).items():
            one = _turned(entry.info, f"blk.{layer}.ffn_{part}_exps.weight", half)
            made[one.info.name] = one
            entries[one.info.name] = renamed(one.info, one.info.name)
    return WeightView(RearrangedWeights(view.source, made), entries)


def _fits(spec: ModelSpec, layer: int, kind: str, info: TensorInfo) -> bool:
    moe = spec.blocks[layer].feed_forward if layer < len(spec.blocks) else None
    if not isinstance(moe, MixtureOfExperts):
        return True
    rows, columns = (2 * moe.hidden, spec.width) if kind == "gate_up" else (spec.width, moe.hidden)
    return info.shape == (moe.num_experts, rows, columns)


def _turned(stored: TensorInfo, name: str, half: int | None) -> Rearranged:
    """half: 0 for the gates, 1 for the ups, None for all."""
    if len(stored.shape) != 3 or stored.shape[2] % 2 * (half is not None) or stored.type not in FLOATS:
        raise FormatError(
            f"tensor {stored.name} is {stored.type.name} {stored.shape}; expected (experts, in, out) floats"
        )
    count, columns, out = stored.shape
    first, rows = (0, out) if half is None else (half * (out // 2), out // 2)

    def order(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        return values.swapaxes(1, 2)[:, first : first + rows]

    return Rearranged(TensorInfo(name, stored.type, (count, rows, columns)), stored.name, order)
