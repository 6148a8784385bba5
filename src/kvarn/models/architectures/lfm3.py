"""LFM3: short convolutions, windows and full attention, each with a norm behind it; a gate for each head."""

from __future__ import annotations

from kvarn.checks import short
from kvarn.formats.tensor_view import WeightView, gathered
from kvarn.models.architectures import lfm2
from kvarn.models.dimensions import Dimensions, read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Attention, Block, FeedForward, ModelSpec, Norm
from kvarn.models.spec_builder import attention_biases, decoder
from kvarn.models.state_layers import ShortConv
from kvarn.models.tensors.fused import without_gate_bias

FULL, WINDOWED, CONV = "full_attention", "sliding_attention", "conv"


def describe(hparams: HParams) -> ModelSpec:
    """Describe an LFM3."""
    dims, norm = read_dimensions(hparams), Norm("rms", hparams.number("layer_norm_eps"))
    if hparams.flag(None, "conv_bias", default=False):
        raise hparams.unsupported("conv_bias is true", "conv_bias")
    has_norms_behind = hparams.flag(None, "use_sandwich_norm", default=True)
    has_gate = hparams.flag(None, "use_attention_gate", default=True)
    qkv_bias, output_bias = attention_biases(hparams)
    kinds, window = _kinds(hparams, dims), hparams.integer("sliding_window", default=0) or None
    ropes = {kind: read_rope(hparams, "half", dims.head_dim, dims.context_length, kind) for kind in {*kinds} - {CONV}}
    if WINDOWED in kinds and window is None:
        raise hparams.unsupported("layer_types names windows, but sliding_window has no size", "layer_types")
    conv = ShortConv(dims.width, hparams.integer("short_conv_kernel"))

    def mixer(layer: int) -> Attention | ShortConv:
        if (kind := kinds[layer]) == CONV:
            return conv
        return dims.attention(
            layer,
            ropes[kind],
            window=window if kind == WINDOWED else None,
            qk_norm=norm,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            output_gate=has_gate,
        )

    blocks = tuple(
        Block(
            mixer(layer),
            FeedForward(dims.hidden[layer], "silu"),
            norm,
            placement="sandwich" if has_norms_behind else "pre",
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def _kinds(hparams: HParams, dims: Dimensions) -> list[str]:
    """Without layer_types: two convolutions between full attention and windows."""
    usual = [
        FULL if layer % 4 == 2 else WINDOWED if layer % 4 == 0 and layer else CONV for layer in range(dims.num_layers)
    ]
    kinds = hparams.raw(None, "layer_types") or usual
    if not isinstance(kinds, list) or len(kinds) != dims.num_layers:
        raise hparams.format_error(f"layer_types must have one entry for each of the {dims.num_layers} layers")
    for kind in kinds:
        if kind not in (FULL, WINDOWED, CONV):
            raise hparams.unsupported(
                f"layer_types has {short(kind)}; known are {FULL}, {WINDOWED}, {CONV}", "layer_types"
            )
    return kinds


def repeat_gates(spec: ModelSpec, view: WeightView) -> WeightView:
    """The one gate of a head is that of each of its values."""
    view = lfm2.rename(spec, view)
    entries = dict(view.entries)
    for layer, block in enumerate(spec.blocks):
        name, mixer = f"blk.{layer}.attn_gate.weight", block.mixer
        entry = entries.get(name)
        if isinstance(mixer, Attention) and entry is not None and entry.info.shape[0] == mixer.num_heads:
            rows = [(head, 1) for head in range(mixer.num_heads) for _ in range(mixer.head_dim)]
            entries[name] = gathered(entry, name, rows)
    return without_gate_bias(spec, WeightView(view.source, entries))
