"""The dimensions every model has, read from its hyperparameters and checked against each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvarn.models.hparams import HParams
from kvarn.models.spec import Attention, Rope


@dataclass(frozen=True, slots=True)
class Dimensions:
    """num_heads, num_kv_heads and hidden have one entry per layer."""

    num_layers: int
    width: int
    vocab_size: int
    context_length: int
    num_heads: tuple[int, ...]
    num_kv_heads: tuple[int, ...]
    head_dim: int
    hidden: tuple[int, ...]

    def attention(self, layer: int, rope: Rope | None, **fields: Any) -> Attention:
        """Build the usual attention of one layer."""
        usual = Attention(
            num_heads=self.num_heads[layer],
            num_kv_heads=self.num_kv_heads[layer],
            head_dim=self.head_dim,
            scale=1.0 / math.sqrt(self.head_dim),
            rope=rope,
        )
        return replace(usual, **fields)


def read_dimensions(
    hparams: HParams,
    hidden: int | None = None,
    *,
    head_dim: int | None = None,
    some_without_heads: bool = False,
    num_layers: int | None = None,
) -> Dimensions:
    """Read the dimensions. hidden stands in for a feed-forward length that is not given; 0: layers may have none.

    head_dim: of an architecture that has other names for it. some_without_heads: layers that have no attention say so
    by 0 KV heads. num_layers: of an architecture that lists them.
    """
    num_layers = num_layers or hparams.integer("num_layers")
    width = hparams.integer("width")
    num_heads = hparams.per_layer("num_heads", num_layers)
    num_kv_heads = hparams.per_layer("num_kv_heads", num_layers, default=num_heads[0])
    for layer, (heads, kv_heads) in enumerate(zip(num_heads, num_kv_heads, strict=True)):
        if kv_heads == 0 and not some_without_heads:
            raise hparams.format_error(f"layer {layer} has 0 KV heads; expected a number from 1 to 1024")
        if kv_heads > 0 and heads % kv_heads:
            raise hparams.format_error(f"layer {layer} has {heads} heads, not a multiple of its {kv_heads} KV heads")
    hiddens = hparams.per_layer("hidden", num_layers, *(() if hidden is None else (hidden,)))
    if 0 in hiddens and hidden != 0:
        raise hparams.format_error(f"layer {hiddens.index(0)} has a feed-forward of length 0; expected 1 or more")
    return Dimensions(
        num_layers=num_layers,
        width=width,
        vocab_size=_vocab_size(hparams),
        context_length=hparams.integer("context_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim or _head_dim(hparams, width, num_heads[0]),
        hidden=hiddens,
    )


def state_dimensions(hparams: HParams) -> Dimensions:
    """Read those of a model without attention: nothing in it ends with a context, GGUF has 2**20 for it."""
    num_layers = hparams.integer("num_layers")
    return Dimensions(
        num_layers=num_layers,
        width=hparams.integer("width"),
        vocab_size=_vocab_size(hparams),
        context_length=hparams.integer("context_length", default=2**20),
        num_heads=(0,) * num_layers,
        num_kv_heads=(0,) * num_layers,
        head_dim=0,
        hidden=(0,) * num_layers,
    )


def _vocab_size(hparams: HParams) -> int:
    """The vocabulary has as many tokens as the tokenizer lists and as the embedding has rows."""
    embedding = hparams.weights.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise hparams.format_error("tensor token_embd.weight is missing or no matrix; the file may be incomplete")
    rows = embedding.shape[0]
    vocab_size: int = hparams.integer("vocab_size", default=rows)
    tokens = hparams.weights.metadata.get("tokenizer.ggml.tokens") if hparams.is_gguf else None
    num_tokens = len(tokens) if isinstance(tokens, Sequence) else rows
    for what, count in (("vocab_size", vocab_size), ("the number of tokens", num_tokens)):
        if count != rows:
            raise hparams.format_error(f"token_embd.weight has {rows} rows, but {what} is {count}")
    return vocab_size


def _head_dim(hparams: HParams, width: int, num_heads: int) -> int:
    head_dim: int = hparams.integer("head_dim", default=width // num_heads)
    if hparams.raw("attention.key_length", "head_dim") is None and width % num_heads:
        raise hparams.format_error(
            f"width {width} is not a multiple of the {num_heads} heads, and no head size is given"
        )
    if hparams.integer("value_dim", default=head_dim) != head_dim:
        raise hparams.unsupported("keys and values differ in size", "attention.value_length")
    return head_dim
