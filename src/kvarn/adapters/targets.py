"""Which matrices of a model an adapter may change, and how the pairs of a file become those of the model.

Files may have Q, K and V, or gate and up, as one matrix, and rows of Q and K in another order than the base: GGUF
files of some architectures hold them for rotation of neighbours, Hugging Face folders for rotation by halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvarn.adapters.weights import EMBEDDING, HEAD, LoraWeights, LowRank
from kvarn.errors import FormatError, UnsupportedModel
from kvarn.models.architectures.entry import Architecture
from kvarn.models.registry import ARCHITECTURES
from kvarn.models.spec import Attention, Block, Encoder, FeedForward, ModelSpec

# Architectures of which GGUF files hold Q and K in another order than folders; see their describe().
REORDERED = frozenset({"llama", "granite", "granitemoe", "smollm3", "llada", "arcee", "granitehybrid", "mistral3"})
MAX_RANK = 1024


@dataclass(frozen=True, slots=True)
class FilePair:
    """One pair as a file has it, under the canonical name of its matrix."""

    name: str  # without .weight
    stored_name: str
    pair: LowRank


def fit_adapter(spec: ModelSpec, found: list[FilePair], path: str, *, is_gguf: bool) -> LoraWeights:
    """Bring the pairs of a file to the model's matrices, or refuse what does not belong to them by name."""
    if isinstance(spec.generation, Encoder):
        raise UnsupportedModel(f"{spec.name!r} is an encoder; adapters are for models that generate", fields=("lora",))
    shapes, pairs = target_shapes(spec), {}
    for one in found:
        for name, pair in _separated(spec, one, shapes, path):
            if name in pairs:
                raise FormatError(f"two pairs are for {name}; one of them is {one.stored_name!r}", file=path)
            _check_shape(name, pair, shapes[name], one.stored_name, path)
            pairs[name] = _reordered(spec, name, pair, is_gguf=is_gguf)
    return LoraWeights(pairs)


def target_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """The matrices that an adapter may change, (rows, columns) each."""
    shapes = {EMBEDDING: (spec.vocab_size, spec.width)}
    if spec.head is not None:
        shapes[HEAD] = (spec.vocab_size, spec.width)
    for layer, block in enumerate(spec.blocks):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in _block_shapes(block, spec.width)}
    return shapes


def _block_shapes(block: Block, width: int) -> Iterator[tuple[str, tuple[int, int]]]:
    mixer, ffn = block.mixer, block.feed_forward
    if isinstance(mixer, Attention):
        query, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        yield from {"attn_q": (query, width), "attn_output": (width, query)}.items()
        if mixer.kv_source is None:
            yield from {"attn_k": (kv, width), "attn_v": (kv, width)}.items()
    if isinstance(ffn, FeedForward) and ffn.hidden and block.beside is None:
        yield from {"ffn_up": (ffn.hidden, width), "ffn_down": (width, ffn.hidden)}.items()
        if ffn.gated:
            yield "ffn_gate", (ffn.hidden, width)


def family_of(spec: ModelSpec) -> Architecture:
    """The architecture's entry in the registry, by its GGUF or its Hugging Face name."""
    for entry in ARCHITECTURES:
        if spec.architecture in (*entry.gguf, *entry.hf):
            return entry
    raise UnsupportedModel(f"architecture {spec.architecture!r} has no adapters", fields=("lora",))


def _separated(
    spec: ModelSpec, one: FilePair, shapes: dict[str, tuple[int, int]], path: str
) -> Iterator[tuple[str, LowRank]]:
    """The pair itself, or those of the matrices that the file has as one: they share a, each with its rows of b."""
    stem, _, part = one.name.rpartition(".")
    parts: tuple[str, ...] = (one.name,)
    if part == "attn_qkv":
        parts = tuple(f"{stem}.attn_{letter}" for letter in "qkv")
    elif part == "ffn_up" and f"{stem}.ffn_gate" in shapes and len(one.pair.b) == 2 * shapes[one.name][0]:
        parts = (f"{stem}.ffn_gate", one.name)
    if any(name not in shapes for name in parts):
        raise UnsupportedModel(
            f"{path}: {one.stored_name!r} changes {one.name}, which adapters cannot change in {spec.name!r} "
            f"({spec.architecture}); they may change {_known_parts(shapes)}",
            fields=(one.name,),
        )
    if len(parts) == 1:
        yield one.name, one.pair
        return
    total, first = sum(shapes[name][0] for name in parts), 0
    if len(one.pair.b) != total:
        raise FormatError(f"{one.stored_name!r} has {len(one.pair.b)} rows, {one.name} has {total}", file=path)
    for name in parts:
        rows = shapes[name][0]
        yield name, replace(one.pair, b=one.pair.b[first : first + rows])
        first += rows


def _known_parts(shapes: dict[str, tuple[int, int]]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in shapes}))


def _check_shape(name: str, pair: LowRank, shape: tuple[int, int], stored_name: str, path: str) -> None:
    rows, columns = (shape[1], shape[0]) if name == EMBEDDING else shape  # it maps tokens to states
    if (len(pair.b), pair.a.shape[1]) != (rows, columns) or pair.b.shape[1] != pair.rank:
        raise FormatError(
            f"{stored_name!r} is {pair.a.shape} and {pair.b.shape}, {name} of the model needs (rank, {columns}) and "
            f"({rows}, rank); the adapter was made for another base",
            file=path,
        )
    if not 1 <= pair.rank <= MAX_RANK:
        raise FormatError(f"{stored_name!r} has rank {pair.rank}; 1 to {MAX_RANK} are allowed", file=path)
    if not (np.isfinite(pair.a).all() and np.isfinite(pair.b).all() and np.isfinite(pair.scale)):
        raise FormatError(f"{stored_name!r} holds NaN or infinity; the file is damaged or training failed", file=path)


def _reordered(spec: ModelSpec, name: str, pair: LowRank, *, is_gguf: bool) -> LowRank:
    """The rows of Q and K in the base's order."""
    stem, _, part = name.rpartition(".")
    if part not in ("attn_q", "attn_k") or not REORDERED.intersection(family_of(spec).gguf):
        return pair
    mixer = spec.blocks[int(stem.rpartition(".")[2])].mixer
    assert isinstance(mixer, Attention), "only attention has Q and K"
    if mixer.rope is None:
        raise UnsupportedModel(f"{name} has no rotation, so the order of its rows is not known", fields=(name,))
    is_neighbours = mixer.rope.style == "interleaved"
    if is_neighbours == is_gguf:
        return pair
    halves = (-1, 2, mixer.head_dim // 2) if is_neighbours else (-1, mixer.head_dim // 2, 2)
    rows = np.arange(len(pair.b)).reshape(halves).swapaxes(1, 2).reshape(-1)
    return replace(pair, b=pair.b[rows])
