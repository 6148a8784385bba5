"""Denoising parameters of one request with the model's values filled in; what the model does not support is refused."""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.decoding.canvas import CanvasShape
from kvarn.decoding.remasking import RULES, PolicyValues, RemaskingRule
from kvarn.diffusion import POLICY_FIELDS, Cache, DiffusionParams, SparseConfig
from kvarn.errors import InvalidParameter
from kvarn.models.spec import MaskedDiffusion
from kvarn.types import SamplingParams

DEFAULT_BLOCK = 32  # of the published sampler
DEFAULT_SUB_BLOCK = 8  # of the published cache of sub-blocks
DEFAULT_TOKENS = 256  # of a fixed canvas where max_tokens says nothing: all of it is computed


@dataclass(frozen=True, slots=True)
class DenoiseConfig:
    """How one request is denoised; every value is set."""

    params: DiffusionParams
    rule: RemaskingRule
    values: PolicyValues
    cache: Cache
    block_length: int
    sub_block_length: int  # block_length where blocks have no parts
    sparse: SparseConfig
    is_fixed: bool  # the whole canvas is there from the start
    is_aligned: bool  # blocks are counted from position 0 and never see what is right of them
    # The logits of a block's first position come from the last row before it, which no step of the block changes: a
    # step of its own fills it (Fast-dLLM v2, arXiv 2509.26328).
    first_alone: bool = False

    @property
    def is_guided(self) -> bool:
        """Whether every step is also computed without the prompt."""
        return self.params.cfg_scale > 0

    def shape(self, num_prompt: int, num_total: int, context: int) -> CanvasShape:
        """The canvas of a prompt and an answer that have num_total tokens together, rounded up to whole blocks."""
        first = 0 if self.is_aligned else num_prompt
        num_blocks = -(-(num_total - first) // self.block_length)
        length = min(first + num_blocks * self.block_length, context)
        return CanvasShape(num_prompt, length, self.block_length, self.is_aligned)


def make_denoise_config(params: DiffusionParams | None, model: MaskedDiffusion) -> DenoiseConfig:
    """Fill in what depends on the model."""
    params = params or DiffusionParams()
    sparse = params.sparse or SparseConfig()
    is_aligned = model.block is not None
    cache: Cache = params.cache or _default_cache(params, is_aligned=is_aligned)
    if is_aligned:
        _check_block_diffusion(params, cache, model)
    elif cache == "block":
        raise InvalidParameter(
            "cache is 'block', and all tokens of this model see each other; use prefix, dual or sparse", field="cache"
        )
    default = sparse.default_block_len if cache == "sparse" else DEFAULT_BLOCK
    block_length = model.block or params.block_length or default
    return DenoiseConfig(
        params=params,
        rule=RULES[params.policy],
        values=policy_values(params),
        cache=cache,
        block_length=block_length,
        sub_block_length=_sub_block_length(params, cache, block_length),
        sparse=sparse,
        is_fixed=not is_aligned and params.canvas != "grow",
        is_aligned=is_aligned,
        first_alone=is_aligned and model.shift,
    )


def check_supported(params: SamplingParams) -> None:
    """Refuse parameters that only have a meaning for autoregressive decoding."""
    refused = {
        "repetition_penalty": params.repetition_penalty not in (None, 1.0),
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "penalty_window": params.penalty_window is not None,
        "dry_multiplier": params.dry_multiplier != 0,
        "sampler": params.sampler is not None,
        "constraint": params.constraint is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "prefill_only": params.prefill_only,
    }
    for name, is_set in refused.items():
        if is_set:
            raise InvalidParameter(
                f"{name} cannot be honoured by a diffusion model; leave it out or use another model", field=name
            )
    if params.logprobs is not None and params.diffusion is not None and params.diffusion.pinned:
        raise InvalidParameter(
            "logprobs and pinned exclude each other: nothing was chosen at a pinned position", field="pinned"
        )


def check_pinned(params: DiffusionParams, max_tokens: int) -> None:
    for index in params.pinned:
        if index >= max_tokens:
            raise InvalidParameter(
                f"pinned has index {index:,}, the answer at most {max_tokens:,} tokens", field="pinned"
            )
    if len(params.pinned) >= max_tokens:
        raise InvalidParameter(
            "every token of the answer is pinned; leave at least one to be filled in", field="pinned"
        )


def policy_values(params: DiffusionParams) -> PolicyValues:
    """The fields of the policy, its authors' values where none is given."""
    given = {name: getattr(params, name) for name in POLICY_FIELDS.get(params.policy, {})}
    chosen = {name: value for name, value in given.items() if value is not None}
    return PolicyValues(**{**POLICY_FIELDS.get(params.policy, {}), **chosen})


def _default_cache(params: DiffusionParams, *, is_aligned: bool) -> Cache:
    if params.sparse is not None and params.sparse.enabled:
        return "sparse"
    return "block" if is_aligned else "dual"


def _sub_block_length(params: DiffusionParams, cache: Cache, block_length: int) -> int:
    usual = DEFAULT_SUB_BLOCK if cache == "sub_block" else block_length
    length = params.sub_block_length or usual
    if block_length % length:
        raise InvalidParameter(
            f"sub_block_length is {length:,}, and blocks of {block_length:,} tokens are not a multiple of it",
            field="sub_block_length",
        )
    if length != block_length and RULES[params.policy].edits:
        raise InvalidParameter(
            f"policy {params.policy!r} edits whole blocks; leave sub_block_length and cache 'sub_block' out",
            field="sub_block_length",
        )
    return length


def _check_block_diffusion(params: DiffusionParams, cache: Cache, model: MaskedDiffusion) -> None:
    if cache not in ("none", "block", "sub_block"):
        raise InvalidParameter(
            f"cache is {cache!r}, and this model denoises block by block; use 'block', 'sub_block' or 'none'",
            field="cache",
        )
    if params.block_length not in (None, model.block):
        raise InvalidParameter(
            f"block_length is {params.block_length:,}, the model's blocks have {model.block:,} tokens",
            field="block_length",
        )
    if params.canvas == "fixed":
        raise InvalidParameter(
            "canvas is 'fixed', and this model denoises block by block; leave it out or use 'grow'", field="canvas"
        )
    if params.cfg_scale > 0:
        raise InvalidParameter(
            "cfg_scale cannot be honoured by a block diffusion model; leave it out", field="cfg_scale"
        )
