"""ModernBERT: an encoder with rope, gated feed-forwards, and windows on both sides in two of three layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarn.models.architectures.bert import encoder, refuse_causal
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.encoders.pooled import Classifier, ClassifierActivation
from kvarn.models.encoders.sentence_modules import read_encoder
from kvarn.models.hparam_names import ACTIVATIONS
from kvarn.models.hparams import HParams
from kvarn.models.rope import frequencies, rope
from kvarn.models.spec import Activation, Block, Encoder, FeedForward, InputEmbedding, ModelSpec, Norm, Pooling, Rope
from kvarn.models.spec_builder import layer_kinds

PATTERN = 3  # every third layer sees all of a text, from the first on
BASES = {"full_attention": 160000.0, "sliding_attention": 10000.0}


def describe(hparams: HParams) -> ModelSpec:
    """Describe a ModernBERT."""
    dims = read_dimensions(hparams)
    norm = Norm("layer", hparams.number("layer_norm_eps"), has_bias=_has_bias(hparams, "norm_bias", "output_norm"))
    refuse_causal(hparams)
    windowed, window = _windowed(hparams, dims), hparams.integer("local_attention") // 2 + 1
    ropes = {is_local: _rope(hparams, dims, is_local=is_local) for is_local in (False, True)}
    attention_bias = _has_bias(hparams, "attention_bias", "blk.0.attn_output")
    ffn_bias = _has_bias(hparams, "mlp_bias", "blk.0.ffn_down")
    activation = _activation(hparams)
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer,
                ropes[windowed[layer]],
                mask="bidirectional",
                window=window if windowed[layer] else None,
                qkv_bias=attention_bias,
                output_bias=attention_bias,
            ),
            feed_forward=FeedForward(dims.hidden[layer], activation, bias=ffn_bias),
            norm=norm,
            attn_norm=layer > 0,
        )
        for layer in range(dims.num_layers)
    )
    return encoder(
        hparams,
        width=dims.width,
        vocab_size=dims.vocab_size,
        context_length=dims.context_length,
        embedding=InputEmbedding(norm=norm),
        blocks=blocks,
        output_norm=norm,
        generation=_generation(hparams, norm),
    )


def _has_bias(hparams: HParams, key: str, tensor: str) -> bool:
    """GGUF says it by its tensors."""
    return hparams.has_tensor(f"{tensor}.bias") if hparams.is_gguf else hparams.flag(None, key, default=False)


def _activation(hparams: HParams) -> Activation:
    if not hparams.is_gguf:
        return hparams.activation("gelu")
    name = hparams.raw("hidden_activation")
    if name is not None and name not in ACTIVATIONS:
        raise hparams.unsupported(f"hidden_activation is {name!r:.40}", "hidden_activation")
    return "gelu" if name is None else ACTIVATIONS[name]


def _windowed(hparams: HParams, dims: Dimensions) -> tuple[bool, ...]:
    period = hparams.integer("global_layer_period", default=PATTERN)
    usual = tuple(layer % period != 0 for layer in range(dims.num_layers))
    return usual if hparams.is_gguf else layer_kinds(hparams, dims, usual, "sliding_attention", None)


def _rope(hparams: HParams, dims: Dimensions, *, is_local: bool) -> Rope:
    kind = "sliding_attention" if is_local else "full_attention"
    if hparams.is_gguf:
        if hparams.raw("rope.scaling.type") not in (None, "none"):
            raise hparams.unsupported("rope scaling of this kind of model is unknown", "rope.scaling.type")
        base = hparams.number("rope_base_local" if is_local else "rope_base", default=BASES[kind])
    else:
        base = hparams.number("rope_base_local_layers" if is_local else "rope_base_global_layers", default=BASES[kind])
        base = hparams.number("rope_base", default=base, table=_entries(hparams, kind))
    return rope("half", frequencies(base, dims.head_dim))


def _entries(hparams: HParams, kind: str) -> Mapping[str, Any]:
    """rope_parameters by kind of layer; anything but a base is refused."""
    if hparams.raw(None, "rope_scaling"):
        raise hparams.unsupported("rope_scaling of this kind of model is unknown", "rope_scaling")
    given = hparams.raw(None, "rope_parameters") or {}
    table = given.get(kind) or {} if isinstance(given, Mapping) else None
    if not isinstance(table, Mapping) or table.get("rope_type", "default") != "default":
        raise hparams.unsupported(f"rope_parameters is {given!r:.100}; a plain rope of each kind is known", "rope_type")
    if unknown := sorted(table.keys() - {"rope_type", "rope_theta"}):
        raise hparams.unsupported(f"the rope is changed by {', '.join(unknown[:4])}", *unknown)
    return table


def _generation(hparams: HParams, norm: Norm) -> Encoder:
    output = hparams.weights.tensors.get("cls.output.weight")
    if output is None:
        found = read_encoder(hparams, "mean")
        assert found is not None, "there is a default"
        return found
    hparams.integer("pooling_type", default=0)  # 4, "rank"
    activation = hparams.raw(None, "classifier_activation") or "gelu"
    known: Mapping[Any, ClassifierActivation] = {"gelu": "gelu", "tanh": "tanh", "relu": "relu"}
    if activation not in known:
        raise hparams.unsupported(f"classifier_activation is {activation!r:.40}", "classifier_activation")
    classifier = Classifier(
        output.shape[0],
        known[activation],
        dense_bias=hparams.has_tensor("cls.bias"),
        norm=norm,
        output_bias=hparams.has_tensor("cls.output.bias"),
        relevant=output.shape[0] - 1,
    )
    return Encoder(_classifier_pooling(hparams), classifier)


def _classifier_pooling(hparams: HParams) -> Pooling:
    name = hparams.raw(None, "classifier_pooling") or "cls"
    poolings: Mapping[Any, Pooling] = {"cls": "cls", "mean": "mean"}
    if name not in poolings:
        raise hparams.unsupported(f"classifier_pooling is {name!r:.40}; known are cls, mean", "classifier_pooling")
    return poolings[name]
