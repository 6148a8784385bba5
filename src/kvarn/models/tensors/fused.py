"""Tensors that files store together, once for two uses, or not at all, as the separate ones of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvarn.errors import FormatError
from kvarn.formats.hf_names import split_gate_up
from kvarn.formats.recast_weights import FilledWeights
from kvarn.formats.tensor_view import ViewEntry, WeightView, renamed, row_slice
from kvarn.models.spec import Attention, FeedForward, ModelSpec

SUFFIXES = ("weight", "bias")


def separate_tensors(spec: ModelSpec, view: WeightView) -> WeightView:
    """Cut attn_qkv (Q, K, V rows) and ffn_up (gate rows, up rows); let both norms of a parallel block be one."""
    entries = dict(view.entries)
    for layer, block in enumerate(spec.blocks):
        stem, ffn = f"blk.{layer}.", block.feed_forward
        if fused := entries.pop(f"{stem}ffn_gate_up_exps.weight", None):
            entries |= split_gate_up(view.source.tensors[fused.parts[0].tensor], stem)
        if isinstance(block.mixer, Attention):
            _cut(entries, stem, "attn_qkv", _qkv_rows(block.mixer))
        if isinstance(ffn, FeedForward) and ffn.gated and f"{stem}ffn_gate.weight" not in entries:
            _cut(entries, stem, "ffn_up", {"ffn_gate": ffn.hidden, "ffn_up": ffn.hidden})
        has_second = any(f"{stem}ffn_norm.{suffix}" in entries for suffix in SUFFIXES)
        if block.placement == "parallel" and not has_second:
            share_tensor(entries, f"{stem}attn_norm", f"{stem}ffn_norm")
        _flatten(entries, f"{stem}ffn_gate_inp_shexp.weight")
    return WeightView(view.source, entries)


def _qkv_rows(attention: Attention) -> dict[str, int]:
    kv_rows = attention.num_kv_heads * attention.head_dim
    return {"attn_q": attention.num_heads * attention.head_dim, "attn_k": kv_rows, "attn_v": kv_rows}


def _cut(entries: dict[str, ViewEntry], stem: str, fused: str, rows: dict[str, int]) -> None:
    for suffix in SUFFIXES:
        entry = entries.pop(f"{stem}{fused}.{suffix}", None)
        if entry is None:
            continue
        total = sum(rows.values())
        if entry.info.shape[:1] != (total,):
            raise FormatError(f"tensor {stem}{fused}.{suffix} has shape {entry.info.shape}; expected {total} rows")
        first = 0
        for name, count in rows.items():
            entries[f"{stem}{name}.{suffix}"] = row_slice(entry, f"{stem}{name}.{suffix}", first, count)
            first += count


def share_tensor(entries: dict[str, ViewEntry], owner: str, name: str) -> None:
    for suffix in SUFFIXES:
        if entry := entries.get(f"{owner}.{suffix}"):
            entries[f"{name}.{suffix}"] = replace(entry, info=replace(entry.info, name=f"{name}.{suffix}"))


def _flatten(entries: dict[str, ViewEntry], name: str) -> None:
    """One row of a matrix is a vector."""
    entry = entries.get(name)
    if entry is not None and entry.info.shape[:-1] == (1,):
        entries[name] = replace(entry, info=replace(entry.info, shape=entry.info.shape[1:]))


def fill_vectors(view: WeightView, lengths: Mapping[str, int], value: float = 1.0) -> WeightView:
    """Add vectors of one value, of so many each: weights of norms that have none, or biases; what a file has stays."""
    missing = {name: length for name, length in lengths.items() if name not in view.entries}
    filled = FilledWeights(view.source, missing, value)
    return WeightView(filled, view.entries | {name: renamed(filled.tensors[name], name) for name in missing})


def without_gate_bias(spec: ModelSpec, view: WeightView) -> WeightView:
    """Add zeros for the biases of gates behind attention, where only Q, K and V have some."""
    mixers = [(layer, block.mixer) for layer, block in enumerate(spec.blocks) if isinstance(block.mixer, Attention)]
    lengths = {
        f"blk.{layer}.attn_gate.bias": mixer.num_heads * mixer.head_dim
        for layer, mixer in mixers
        if mixer.output_gate and mixer.qkv_bias
    }
    return fill_vectors(view, lengths, 0.0)
