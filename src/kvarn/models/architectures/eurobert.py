"""EuroBERT: a Llama that sees both ways and embeds texts; jina-embeddings-v5-text-nano is one."""

from __future__ import annotations

from kvarn.formats.tensor_view import WeightView
from kvarn.models.architectures.bert import encoder, refuse_causal
from kvarn.models.dimensions import read_dimensions
from kvarn.models.encoders.sentence_modules import read_encoder
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, InputEmbedding, ModelSpec
from kvarn.models.spec_builder import attention_biases, ffn_bias, rms_norm


def describe(hparams: HParams) -> ModelSpec:
    """Describe a EuroBERT."""
    dims, norm = read_dimensions(hparams), rms_norm(hparams)
    refuse_causal(hparams)
    if hparams.has_tensor("cls.output.weight"):
        raise hparams.unsupported("a classifier of this kind of model is unknown", "classifier")
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    qkv_bias, output_bias = attention_biases(hparams)
    activation, bias = hparams.activation("silu"), ffn_bias(hparams)
    blocks = tuple(
        Block(
            mixer=dims.attention(layer, rope, mask="bidirectional", qkv_bias=qkv_bias, output_bias=output_bias),
            feed_forward=FeedForward(hidden, activation, bias=bias),
            norm=norm,
        )
        for layer, hidden in enumerate(dims.hidden)
    )
    pooled = read_encoder(hparams, "mean")
    assert pooled is not None, "there is a default"
    return encoder(
        hparams,
        width=dims.width,
        vocab_size=dims.vocab_size,
        context_length=dims.context_length,
        embedding=InputEmbedding(),
        blocks=blocks,
        output_norm=norm,
        generation=pooled,
    )


def drop_head(_: ModelSpec, view: WeightView) -> WeightView:
    """Leave out the head that guesses masked words."""
    return WeightView(view.source, {name: one for name, one in view.entries.items() if name != "output.weight"})
