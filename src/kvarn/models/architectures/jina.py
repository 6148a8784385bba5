"""Jina's encoders: BERTs whose scores fall with the distance (ALiBi, v2) or that have rope (v3), and its rerankers.

The second layout of v2, that of the model for code, has norms of Q and K and one more behind attention.
"""

from __future__ import annotations

import math

from kvarn.formats.tensor_view import WeightView, row_slice
from kvarn.models.architectures import bert
from kvarn.models.architectures.bert import bert_generation, encoder, input_embedding, refuse_causal
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec, Norm
from kvarn.models.tensors.fused import fill_vectors

LARGEST_BIAS = 8.0  # arXiv:2108.12409
ADAPTERS = "the adapters for single tasks are left out: texts are embedded as without a task"


def describe_bert(hparams: HParams) -> ModelSpec:
    """Describe a BERT or a RoBERTa by the kind of its positions: Jina's folders have the same model types."""
    known = {"absolute": bert.describe, "alibi": describe_v2, "rotary": describe_v3}
    kind = hparams.raw(None, "position_embedding_type") or "absolute"
    if kind not in known:
        raise hparams.unsupported(
            f"position_embedding_type is {kind!r:.40}; known are {', '.join(known)}", "position_embedding_type"
        )
    return known[kind](hparams)


def describe_jina(hparams: HParams) -> ModelSpec:
    """Describe a model that is Jina's by its name."""
    return describe_v2(hparams) if hparams.architecture == "jina-bert-v2" else describe_v3(hparams)


def describe_v2(hparams: HParams) -> ModelSpec:
    """Describe a JinaBERT: no positions, gated feed-forwards, norms after each residual."""
    dims = read_dimensions(hparams)
    norm = Norm("layer", hparams.number("layer_norm_eps"), has_bias=True)
    refuse_causal(hparams)
    kind = hparams.raw(None, "feed_forward_type")
    if not hparams.is_gguf and (kind != "geglu" or hparams.activation("gelu") != "gelu"):
        raise hparams.unsupported(f"feed_forward_type is {kind!r:.40}; known is geglu with gelu", "feed_forward_type")
    attention = dims.attention(
        0,
        None,
        mask="bidirectional",
        qkv_bias=True,
        output_bias=True,
        alibi=slopes(dims.num_heads[0]),
        qk_norm=norm if hparams.has_tensor("blk.0.attn_q_norm.weight") else None,
        qk_norm_span="row",
    )
    blocks = tuple(
        Block(
            mixer=attention,
            feed_forward=FeedForward(hidden, "gelu", bias=True),
            norm=norm,
            placement="residual",
            second_norm=hparams.has_tensor(f"blk.{layer}.attn_norm_2.weight"),
        )
        for layer, hidden in enumerate(dims.hidden)
    )
    return encoder(
        hparams,
        width=dims.width,
        vocab_size=dims.vocab_size,
        context_length=dims.context_length,
        embedding=input_embedding(hparams, None, norm),
        blocks=blocks,
        output_norm=None,
        generation=bert_generation(hparams),
    )


def describe_v3(hparams: HParams) -> ModelSpec:
    """Describe jina-embeddings-v3: an XLM-RoBERTa with rope instead of learned positions."""
    dims = read_dimensions(hparams)
    norm = Norm("layer", hparams.number("layer_norm_eps"), has_bias=True)
    refuse_causal(hparams)
    if hparams.raw(None, "lora_adaptations"):
        hparams.notes[ADAPTERS] = None
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    attention = dims.attention(0, rope, mask="bidirectional", qkv_bias=True, output_bias=True)
    activation = hparams.activation("gelu")
    blocks = tuple(
        Block(attention, FeedForward(hidden, activation, gated=False, bias=True), norm, placement="residual")
        for hidden in dims.hidden
    )
    return encoder(
        hparams,
        width=dims.width,
        vocab_size=dims.vocab_size,
        context_length=dims.context_length,
        embedding=input_embedding(hparams, None, norm),
        blocks=blocks,
        output_norm=None,
        generation=bert_generation(hparams),
    )


def slopes(num_heads: int) -> tuple[float, ...]:
    """A geometric sequence; where heads are no power of two, every other one of the next longer sequence follows."""
    whole = 2 ** int(math.log2(num_heads))
    first = [2.0 ** (-LARGEST_BIAS * (head + 1) / whole) for head in range(whole)]
    between = [2.0 ** (-LARGEST_BIAS * (2 * head + 1) / (2 * whole)) for head in range(num_heads - whole)]
    return (*first, *between)


def separate(spec: ModelSpec, view: WeightView) -> WeightView:
    """Cut ffn_up, which has the gates last in the model for code, else first; neither half has a bias: zeros."""
    if spec.blocks[0].attention.alibi is None:
        return bert.drop_position_offset(spec, view)
    entries, lengths = dict(view.entries), dict[str, int]()
    for layer, block in enumerate(spec.blocks):
        stem, hidden = f"blk.{layer}.", block.feed_forward.hidden
        fused = entries.get(f"{stem}ffn_up.weight")
        if fused is not None and fused.info.shape[0] == 2 * hidden:
            for first, part in zip((0, hidden), ("up", "gate") if block.second_norm else ("gate", "up"), strict=True):
                name = f"{stem}ffn_{part}.weight"
                entries[name] = row_slice(fused, name, first, hidden)
        lengths |= {f"{stem}ffn_{part}.bias": hidden for part in ("gate", "up")}
    return fill_vectors(WeightView(view.source, entries), lengths, 0.0)
