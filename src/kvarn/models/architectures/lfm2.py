"""LFM2: most layers are short convolutions with gates, the others attention with norms of Q and K; or with experts."""

from __future__ import annotations

from dataclasses import replace

from kvarn.errors import FormatError
from kvarn.formats.tensor_view import WeightView, renamed
from kvarn.models.architectures.glm4_moe import require_sigmoid
from kvarn.models.architectures.llama import mixture_of_experts
from kvarn.models.architectures.qwen3_next import flatten_conv
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, MixtureOfExperts, ModelSpec, Norm
from kvarn.models.spec_builder import decoder, layer_kinds
from kvarn.models.state_layers import ShortConv


def describe(hparams: HParams) -> ModelSpec:
    """Describe an LFM2, dense or with experts."""
    dims = read_dimensions(hparams, some_without_heads=True)
    norm = Norm("rms", hparams.number("rms_norm_eps" if hparams.is_gguf else "layer_norm_eps"))
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    if hparams.flag(None, "conv_bias", default=False):
        raise hparams.unsupported("conv_bias is true", "conv_bias")
    indices = hparams.raw(None, "full_attn_idxs")
    if indices is not None and not isinstance(indices, list | tuple):
        raise hparams.format_error(f"full_attn_idxs is {indices!r:.60}; expected a list of layers")
    if hparams.is_gguf:
        usual = tuple(heads == 0 for heads in dims.num_kv_heads)
    else:
        usual = tuple(indices is not None and layer not in indices for layer in range(dims.num_layers))
    is_conv = layer_kinds(hparams, dims, usual, "conv", None)
    conv = ShortConv(dims.width, hparams.integer("short_conv_kernel"))
    num_experts = hparams.integer("num_experts", default=0)
    num_dense = hparams.integer("num_dense_layers", default=0) if num_experts else dims.num_layers
    experts = _experts(hparams, num_experts, num_dense) if num_experts else None
    blocks = tuple(
        Block(
            mixer=conv if is_conv[layer] else dims.attention(layer, rope, qk_norm=norm),
            feed_forward=FeedForward(_hidden(hparams, dims.hidden[layer]), "silu")
            if experts is None or layer < num_dense
            else experts,
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)


def _experts(hparams: HParams, num_experts: int, num_dense: int) -> MixtureOfExperts:
    require_sigmoid(hparams)
    renormalise = hparams.flag("expert_weights_norm", "norm_topk_prob", default=True)
    experts = mixture_of_experts(hparams, num_experts, hparams.integer("expert_hidden"), renormalise=renormalise)
    has_bias = hparams.flag(None, "use_expert_bias", default=True)
    if hparams.is_gguf:
        has_bias = hparams.has_tensor(f"blk.{num_dense}.exp_probs_b.bias")
    scale = hparams.number("expert_scale", default=1.0) or 1.0
    return replace(experts, scoring="sigmoid", selection_bias=has_bias, scale=scale)


def _hidden(hparams: HParams, given: int) -> int:
    """GGUF has the length itself, as models with experts; config.json one that is to be cut and rounded up."""
    if hparams.is_gguf or not hparams.has_key("block_multiple_of"):
        return given
    wished = hparams.raw(None, "block_ff_dim")
    given = given if wished is None else wished
    multiple, multiplier = hparams.integer("ffn_multiple"), hparams.number("ffn_multiplier")
    if not isinstance(given, int) or not 1 <= given <= 2**22:
        raise hparams.format_error(f"block_ff_dim is {given!r:.60}; expected a number from 1 to {2**22}")
    if not hparams.flag(None, "block_auto_adjust_ff_dim", default=True):
        return given
    cut = int(multiplier * int(2 * given / 3))
    return int(-(-cut // multiple) * multiple)


def rename(spec: ModelSpec, view: WeightView) -> WeightView:
    """GGUF calls the last norm that of the embedding; safetensors' kernels have an axis more."""
    entries = dict(view.entries)
    if view.metadata.get("hf") is None and "token_embd_norm.weight" in entries:
        if "output_norm.weight" in entries:
            raise FormatError("two tensors are the last norm: token_embd_norm and output_norm", file=view.path)
        entries["output_norm.weight"] = renamed(entries.pop("token_embd_norm.weight").info, "output_norm.weight")
    for layer in range(len(spec.blocks)):
        flatten_conv(entries, f"blk.{layer}.shortconv.conv.weight")
    return WeightView(view.source, entries)
