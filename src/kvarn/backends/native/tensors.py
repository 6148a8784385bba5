"""The weights as the core wants them: which tensors are packed matrices, which plain floats, which are doubled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvarn.formats.weight_proxy import WeightProxy
from kvarn.formats.weights import TensorType, WeightSource
from kvarn.models.diffusion.uniform import UniformDiffusion
from kvarn.models.recurrent import Recurrent, conv_channels, recurrent_of
from kvarn.models.residual import AltUp
from kvarn.models.spec import Attention, Block, LatentAttention, MixtureOfExperts, ModelSpec, Norm
from kvarn.models.state_layers import GatedDeltaNet, Mamba, Mamba2, ShortConv
from kvarn.models.tensors.shapes import block_norms

TOKENS, TYPES = "token_embd.weight", "token_types.weight"


def matrix_names(spec: ModelSpec) -> Iterator[str]:
    """Names of the matrices, in the order they are used."""
    yield "token_embd.weight" if spec.embedding.joined is None else "eh_proj.weight"
    if spec.embedding.per_layer is not None:
        yield from ("per_layer_token_embd.weight", "per_layer_model_proj.weight")
    if isinstance(spec.generation, UniformDiffusion):
        yield from ("self_cond_gate.weight", "self_cond_up.weight", "self_cond_down.weight")
    if spec.altup is not None:
        yield from ("altup_proj.weight", "altup_unembd_proj.weight")
    for index, block in enumerate(spec.blocks):
        for name in _block_matrices(block):
            yield f"blk.{index}.{name}.weight"
    if spec.head is not None and not spec.head.tied:
        yield "output.weight"


def vector_names(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Names and sizes of what is kept as floats: norms, biases, learned positions, the first token type."""
    if spec.embedding.positions is not None:
        yield "position_embd.weight", spec.embedding.positions * spec.width
    if spec.embedding.token_types:
        yield "token_types.weight", spec.width
    yield from _norm("token_embd_norm", spec.embedding.norm, spec.width)
    for name in ("enorm", "hnorm"):
        yield from _norm(name, spec.embedding.joined, spec.width)
    if spec.embedding.per_layer is not None:
        yield from _norm("per_layer_proj_norm", spec.embedding.per_layer.norm, spec.embedding.per_layer.length)
    if isinstance(spec.generation, UniformDiffusion):
        yield from _norm("self_cond_pre_norm", spec.generation.norm, spec.width)
    for index, block in enumerate(spec.blocks):
        for name, size in _block_vectors(block, spec.width):
            yield f"blk.{index}.{name}", size
        for name, size in _altup_vectors(spec.altup, spec.width):
            yield f"blk.{index}.{name}", size
    yield from _norm("output_norm", spec.output_norm, spec.width)
    if spec.head is not None and spec.head.bias:
        yield "output.bias", spec.vocab_size


def _block_matrices(block: Block) -> Iterator[str]:
    mixer, ffn = block.mixer, block.feed_forward
    if isinstance(mixer, GatedDeltaNet):
        yield from ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha", "ssm_out")
    elif isinstance(mixer, ShortConv):
        yield from ("shortconv.in_proj", "shortconv.out_proj")
    elif isinstance(mixer, LatentAttention):
        yield from ("attn_q",) if mixer.query_rank is None else ("attn_q_a", "attn_q_b")
        yield from ("attn_kv_a_mqa", "attn_k_b", "attn_v_b", "attn_output")
    elif isinstance(mixer, Attention):
        yield from ("attn_q", *(("attn_k", "attn_v") if mixer.kv_source is None else ()), "attn_output")
        yield from ("attn_gate",) if mixer.output_gate else ()
    if isinstance(recurrent_of(block), Mamba2 | Mamba):
        yield from ("ssm_in", *(("ssm_x", "ssm_dt") if isinstance(mixer, Mamba) else ()), "ssm_out")
    if block.per_layer is not None:
        yield from ("inp_gate", "proj")
    if block.laurel is not None:
        yield from ("laurel_l", "laurel_r")
    experts = ffn if isinstance(ffn, MixtureOfExperts) else block.beside
    if experts is not None:
        parts = ("gate", "up", "down") if experts.gated else ("up", "down")
        yield from ("ffn_gate_inp", *(f"ffn_{part}_exps" for part in parts))
        if experts.shared is not None:
            yield from (f"ffn_{part}_shexp" for part in parts)
    if not isinstance(ffn, MixtureOfExperts) and ffn.hidden:
        yield from ("ffn_gate", "ffn_up", "ffn_down") if ffn.gated else ("ffn_up", "ffn_down")


def _block_vectors(block: Block, width: int) -> Iterator[tuple[str, int]]:
    for name in block_norms(block):
        yield from _norm(name, block.norm, width)
    if isinstance(block.mixer, Attention):
        yield from _attention_vectors(block.mixer, width)
    elif isinstance(block.mixer, LatentAttention):
        if block.mixer.query_rank is not None:
            yield from _norm("attn_q_a_norm", block.mixer.norm, block.mixer.query_rank)
        yield from _norm("attn_kv_a_norm", block.mixer.norm, block.mixer.rank)
    if state := recurrent_of(block):
        yield from _state_vectors(state, width)
    if block.output_scale:
        yield "layer_output_scale.weight", 1
    if block.text_scale:
        yield "enc_layer_output_scale.weight", 1
    if block.beside is not None:
        yield from _expert_vectors(block.beside, width)
    ffn = block.feed_forward
    if isinstance(ffn, MixtureOfExperts):
        yield from _expert_vectors(ffn, width)
    elif ffn.bias:
        if ffn.gated:
            yield "ffn_gate.bias", ffn.hidden
        yield from (("ffn_up.bias", ffn.hidden), ("ffn_down.bias", width))


def _altup_vectors(altup: AltUp | None, width: int) -> Iterator[tuple[str, int]]:
    """Small matrices, too: they are read as floats."""
    if altup is None:
        return
    yield from _norm("altup_router_norm", altup.norm, width)
    yield "altup_router.weight", altup.streams * width
    yield "altup_predict_coef.weight", altup.streams**3
    yield "altup_correct_coef.weight", altup.streams**2
    if altup.correct_scale:
        yield "altup_correct_scale.weight", width


def _state_vectors(layer: Recurrent, width: int) -> Iterator[tuple[str, int]]:
    """Kernels of convolutions, too: they are read as floats."""
    name = "shortconv.conv" if isinstance(layer, ShortConv) else "ssm_conv1d"
    yield f"{name}.weight", conv_channels(layer) * layer.kernel
    if isinstance(layer, GatedDeltaNet):
        yield from (("ssm_dt.bias", layer.num_value_heads), ("ssm_a", layer.num_value_heads))
        yield from _norm("ssm_norm", layer.norm, layer.value_dim)
    if not isinstance(layer, Mamba2 | Mamba):
        return
    if layer.conv_bias:
        yield "ssm_conv1d.bias", conv_channels(layer)
    yield from (("ssm_in.bias", _num_inputs(layer)),) if layer.bias else ()
    if isinstance(layer, Mamba2):
        yield from ((name, layer.num_heads) for name in ("ssm_dt.bias", "ssm_a", "ssm_d"))
        yield from _norm("ssm_norm", layer.norm, layer.values)
        yield from (("ssm_out.bias", width),) if layer.output_bias else ()
    else:
        yield from (("ssm_dt.bias", layer.width), ("ssm_a", layer.width * layer.state_dim), ("ssm_d", layer.width))
        yield from (("ssm_out.bias", width),) if layer.bias else ()


def _num_inputs(layer: Mamba2 | Mamba) -> int:
    return layer.inputs if isinstance(layer, Mamba2) else 2 * layer.width


def _attention_vectors(attention: Attention, width: int) -> Iterator[tuple[str, int]]:
    q, kv = (count * attention.head_dim for count in (attention.num_heads, attention.num_kv_heads))
    if attention.qkv_bias:
        yield "attn_q.bias", q
        yield from (("attn_k.bias", kv), ("attn_v.bias", kv)) if attention.kv_source is None else ()
        if attention.output_gate:
            yield "attn_gate.bias", q
    if attention.output_bias:
        yield "attn_output.bias", width
    if attention.sinks:
        yield "attn_sinks.weight", attention.num_heads
    is_row = attention.qk_norm_span == "row"
    yield from _norm("attn_q_norm", attention.qk_norm, q if is_row else attention.head_dim)
    if attention.kv_source is None:
        yield from _norm("attn_k_norm", attention.qk_norm, kv if is_row else attention.head_dim)


def _expert_vectors(moe: MixtureOfExperts, width: int) -> Iterator[tuple[str, int]]:
    count = moe.num_experts
    if moe.expert_bias:
        hidden = count * moe.hidden
        yield from (("ffn_gate_exps.bias", hidden),) if moe.gated else ()
        yield from (("ffn_up_exps.bias", hidden), ("ffn_down_exps.bias", count * width))
    if moe.router_bias:
        yield "ffn_gate_inp.bias", count
    if moe.selection_bias:
        yield "exp_probs_b.bias", count
    if moe.expert_scale:
        yield "ffn_down_exps.scale", count
    if moe.output_bias:
        yield "ffn_exps.bias", width
    if moe.shared is not None and moe.shared.gate:
        yield "ffn_gate_inp_shexp.weight", width


def _norm(name: str, norm: Norm | None, size: int) -> Iterator[tuple[str, int]]:
    """A layer norm without a bias is one with zeros here: its kernel always adds one."""
    if norm is None:
        return
    yield f"{name}.weight", size
    if norm.kind == "layer":
        yield f"{name}.bias", size


def read_vector(weights: WeightSource, name: str, size: int) -> npt.NDArray[np.float32]:
    """A tensor of vector_names()."""
    if name not in weights.tensors:
        return np.zeros(size, np.float32)  # the bias of a layer norm that has none
    values = weights.array(name)
    if values.ndim == 2 and "conv" in name:  # the core reads it row by row of the kernel
        values = values.T
    return np.ascontiguousarray(values.reshape(-1)[:size], np.float32)


class SegmentedWeights(WeightProxy):
    """A WeightSource with token_embd = [E, E + types[1] - types[0]], always F32; types[0] is added to both later."""

    def __init__(self, source: WeightSource) -> None:
        tokens = source.tensors[TOKENS]
        doubled = replace(tokens, type=TensorType.F32, shape=(2 * tokens.shape[0], tokens.shape[1]))
        super().__init__(source, {TOKENS: doubled})

    def _changed_raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self.array(name).reshape(-1).view(np.uint8)

    def _changed_array(self, name: str) -> npt.NDArray[np.float32]:
        tokens, types = self._source.array(name), self._source.array(TYPES)
        return np.concatenate([tokens, tokens + (types[1] - types[0])]).astype(np.float32)
