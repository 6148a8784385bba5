"""The sizes every model has, read and checked together, and the parts all decoders build from them alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvarn.models.hparams import HParams
from kvarn.models.spec import (
    Attention,
    Autoregressive,
    Block,
    Encoder,
    Head,
    InputEmbedding,
    ModelSpec,
    Norm,
    Pooling,
    Rope,
)

POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}


@dataclass(frozen=True, slots=True)
class Dimensions:
    """hidden, heads and kv_heads have one entry per layer."""

    blocks: int
    width: int
    vocab: int
    context: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int
    hidden: tuple[int, ...]

    def attention(self, layer: int, rope: Rope | None, **fields: Any) -> Attention:
        """Build the usual attention of one layer."""
        usual = Attention(
            num_heads=self.heads[layer],
            num_kv_heads=self.kv_heads[layer],
            head_dim=self.head_dim,
            scale=1.0 / math.sqrt(self.head_dim),
            rope=rope,
        )
        return replace(usual, **fields)


def read_sizes(facts: HParams, hidden: int | None = None) -> Dimensions:
    """Read the sizes and check that they fit together. hidden stands in for a feed-forward size that is not given."""
    blocks = facts.count("blocks")
    width = facts.count("width")
    heads = facts.counts("heads", blocks)
    kv_heads = facts.counts("kv_heads", blocks, default=heads[0])
    for layer, (num_heads, num_kv_heads) in enumerate(zip(heads, kv_heads, strict=True)):
        if num_heads % num_kv_heads:
            raise facts.wrong(f"layer {layer} has {num_heads} heads, not a multiple of its {num_kv_heads} KV heads")
    return Dimensions(
        blocks=blocks,
        width=width,
        vocab=_vocabulary(facts),
        context=facts.count("context"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(facts, width, heads[0]),
        hidden=facts.counts("hidden", blocks, *(() if hidden is None else (hidden,))),
    )


def rms_norm(facts: HParams) -> Norm:
    return Norm("rms", facts.number("rms_eps"))


def window_layers(facts: HParams, sizes: Dimensions, usual: tuple[bool, ...]) -> tuple[bool, ...]:
    """Say which layers attend through a window: config.json's layer_types, else the architecture's usual ones."""
    kinds = facts.raw(None, "layer_types")
    if kinds is None:
        return usual
    if not isinstance(kinds, list | tuple) or len(kinds) != sizes.blocks:
        raise facts.wrong(f"layer_types must have one entry for each of the {sizes.blocks} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise facts.unsupported(
                f"layer_types has {kind!r}; known are full_attention, sliding_attention", "layer_types"
            )
    return tuple(kind == "sliding_attention" for kind in kinds)


def decoder(
    facts: HParams,
    sizes: Dimensions,
    blocks: tuple[Block, ...],
    norm: Norm,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> ModelSpec:
    """Put a causal language model together; one made for embeddings says so by its pooling."""
    pooling = read_pooling(facts, default=None)
    return ModelSpec(
        architecture=facts.architecture,
        name=model_name(facts),
        width=sizes.width,
        vocab_size=sizes.vocab,
        context_length=sizes.context,
        embedding=InputEmbedding(scale=scale),
        blocks=blocks,
        output_norm=norm,
        head=None if pooling else Head(tied=not facts.has("output.weight"), softcap=softcap),
        generation=Encoder(pooling) if pooling else Autoregressive(),
    )


def read_pooling(facts: HParams, default: Pooling | None) -> Pooling | None:
    """Read how hidden states become one vector; 0 in GGUF means: not said."""
    number = facts.count("pooling", default=0)
    if number == 0:
        return default
    if number not in POOLINGS:
        raise facts.unsupported(f"pooling_type is {number}; known are 1 mean, 2 cls, 3 last", "pooling_type")
    return POOLINGS[number]


def model_name(facts: HParams) -> str:
    """Find a name for people."""
    metadata = facts.weights.metadata
    name = metadata.get("general.name") if facts.is_gguf else metadata["hf"].get("_name_or_path")
    return name if isinstance(name, str) and name else facts.architecture


def _vocabulary(facts: HParams) -> int:
    """The vocabulary has as many tokens as the tokenizer lists and as the embedding has rows."""
    embedding = facts.weights.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise facts.wrong("tensor token_embd.weight is missing or no matrix; the file may be incomplete")
    rows = embedding.shape[0]
    vocab: int = facts.count("vocab", default=rows)
    tokens = facts.weights.metadata.get("tokenizer.ggml.tokens") if facts.is_gguf else None
    num_tokens = len(tokens) if isinstance(tokens, Sequence) else rows
    for what, count in (("vocab_size", vocab), ("the number of tokens", num_tokens)):
        if count != rows:
            raise facts.wrong(f"token_embd.weight has {rows} rows, but {what} is {count}")
    return vocab


def _head_dim(facts: HParams, width: int, heads: int) -> int:
    head_dim: int = facts.count("head_dim", default=width // heads)
    if facts.raw("attention.key_length", "head_dim") is None and width % heads:
        raise facts.wrong(f"width {width} is not a multiple of the {heads} heads, and no head size is given")
    if facts.count("value_dim", default=head_dim) != head_dim:
        raise facts.unsupported("keys and values differ in size", "attention.value_length")
    return head_dim
