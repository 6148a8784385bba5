"""The memory plan: what a model will take, against what there is, before any of it is loaded.

The KV cache is reserved as address space; its pages are taken as tokens fill them. The plan counts it in full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvarn.config import EngineConfig
from kvarn.errors import ConfigError, DoesNotFit
from kvarn.formats.q8_weights import Q8Weights
from kvarn.formats.weights import WeightSource
from kvarn.machine import MemoryAvailable
from kvarn.models.spec import Encoder, FeedForward, ModelSpec

RUNTIME_BYTES = 64 << 20  # interpreter, libraries, template helper
TOKENIZER_BYTES_PER_TOKEN = 256  # measured on vocabularies of 49k to 262k entries
KV_SHARE = 0.8  # of the memory left beside the weights, for a cache nobody sized
CACHE_TOKENS = 8192  # at least, where they fit: a model of a short context shall serve several requests, too
MIN_CONTEXT = 256  # a model that cannot hold this much is refused
BATCH_TOKENS = 512
KV_VALUE_BYTES = {"f16": 2, "f32": 4}
Q8_GROUP = 32  # q8_0: dimensions that share one f16 scale


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and the context they allow."""

    weights_bytes: int
    repack_bytes: int  # beside the weights while loading, before there is a KV cache
    kv_bytes: int
    scratch_bytes: int
    runtime_bytes: int
    available: MemoryAvailable
    context: int  # tokens per request
    kv_token_bytes: int
    note: str | None = None  # why context is less than the model's, if it is

    @property
    def needed_bytes(self) -> int:
        """The most that is in use at one time."""
        return self.weights_bytes + self.runtime_bytes + max(self.repack_bytes, self.kv_bytes + self.scratch_bytes)


def held_weights(spec: ModelSpec, weights: WeightSource, config: EngineConfig) -> WeightSource:
    """As the file has them, except an encoder's floats; the reference defines what is right, so it keeps those too."""
    is_compact = config.encoder_weights == "q8_0" and config.backend != "reference"
    return Q8Weights(weights) if is_compact and isinstance(spec.generation, Encoder) else weights


def plan_memory(
    spec: ModelSpec,
    weights: WeightSource,
    context: int | None,
    kv_bytes: int | None,
    available: MemoryAvailable,
    *,
    kv_dtype: str = "f16",
) -> MemoryPlan:
    """Size everything, or refuse with the numbers and the cheapest changes."""
    _check_context(spec, context)
    token_bytes = kv_token_bytes(spec, kv_dtype)
    fixed = MemoryPlan(
        weights_bytes=sum(info.num_bytes for info in weights.tensors.values()),
        repack_bytes=2 * max((info.num_bytes for info in weights.tensors.values()), default=0),
        kv_bytes=0,
        scratch_bytes=scratch_bytes(spec),
        runtime_bytes=RUNTIME_BYTES + spec.vocab_size * TOKENIZER_BYTES_PER_TOKEN,
        available=available,
        context=0,
        kv_token_bytes=token_bytes,
    )
    left = available.num_bytes - fixed.weights_bytes - fixed.runtime_bytes - fixed.scratch_bytes
    cache = _choose_cache(spec, context, kv_bytes, token_bytes, left)
    plan = replace(fixed, context=cache.context, kv_bytes=cache.num_bytes, note=cache.note)
    if plan.needed_bytes > available.num_bytes:
        raise _refusal(plan, left)
    return plan


def kv_token_bytes(spec: ModelSpec, dtype: str = "f16") -> int:
    """K and V of one token in all layers."""
    return sum(2 * b.attention.num_kv_heads * kv_head_bytes(b.attention.head_dim, dtype) for b in spec.blocks)


def kv_head_bytes(head_dim: int, dtype: str) -> int:
    """K, or V, of one head of one token."""
    if dtype == "q8_0":
        return head_dim + 2 * -(-head_dim // Q8_GROUP)
    return head_dim * KV_VALUE_BYTES[dtype]


def scratch_bytes(spec: ModelSpec, batch_tokens: int = BATCH_TOKENS) -> int:
    """Activations of the widest layer for one full batch in f32, and two rows of logits."""
    widest = 0
    for block in spec.blocks:
        attention, ffn = block.attention, block.feed_forward
        heads = (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
        hidden = ffn.hidden if isinstance(ffn, FeedForward) else ffn.hidden * ffn.num_active
        widest = max(widest, 4 * spec.width + heads + 2 * hidden)
    return 4 * (batch_tokens * widest + 2 * spec.vocab_size)


@dataclass(frozen=True, slots=True)
class _Cache:
    context: int
    num_bytes: int
    note: str | None = None


def _choose_cache(spec: ModelSpec, context: int | None, kv_bytes: int | None, token_bytes: int, left: int) -> _Cache:
    wanted = context or spec.context_length
    if isinstance(spec.generation, Encoder):
        # An encoder computes a text in one piece; two batches of room let short texts share one.
        return _Cache(wanted, 2 * max(wanted, BATCH_TOKENS) * token_bytes)
    if kv_bytes is not None:
        return _sized_cache(wanted, kv_bytes, token_bytes, is_context_given=context is not None)
    if context is not None:
        return _Cache(context, context * token_bytes)
    fitting = max(0, int(left * KV_SHARE)) // token_bytes
    if fitting >= wanted or fitting < MIN_CONTEXT:  # the second case is refused by the caller
        return _Cache(wanted, max(wanted, min(CACHE_TOKENS, fitting)) * token_bytes)
    note = f"the model allows {wanted:,} tokens; memory allows {fitting:,}"
    return _Cache(fitting, fitting * token_bytes, note)


def _sized_cache(wanted: int, kv_bytes: int, token_bytes: int, *, is_context_given: bool) -> _Cache:
    fitting = kv_bytes // token_bytes
    if fitting >= wanted:
        return _Cache(wanted, kv_bytes)
    if is_context_given or fitting < 1:
        raise ConfigError(
            f"kv_bytes={kv_bytes:,} holds {fitting:,} tokens, context is {wanted:,}; "
            f"give kv_bytes={wanted * token_bytes:,} or a smaller context="
        )
    return _Cache(fitting, kv_bytes, f"the model allows {wanted:,} tokens; kv_bytes holds {fitting:,}")


def _check_context(spec: ModelSpec, context: int | None) -> None:
    if context is not None and context > spec.context_length:
        raise ConfigError(f"context is {context:,}, the model was made for {spec.context_length:,}; give at most that")


def _refusal(plan: MemoryPlan, left: int) -> DoesNotFit:
    others = plan.scratch_bytes + plan.runtime_bytes
    fitting = max(0, left) // plan.kv_token_bytes
    changes = ["use a smaller quantisation or model"]
    if fitting >= plan.context and plan.kv_bytes > left:  # a cache of several contexts was asked for
        changes.insert(0, f"set kv_bytes={fitting * plan.kv_token_bytes} or less")
    elif MIN_CONTEXT <= fitting < plan.context:
        changes.insert(0, f"set context={fitting} (kv_bytes={fitting * plan.kv_token_bytes})")
    return DoesNotFit(
        f"the model needs {show_bytes(plan.needed_bytes)} (weights {show_bytes(plan.weights_bytes)}, "
        f"KV cache {show_bytes(plan.kv_bytes)} for {plan.context:,} tokens, scratch and runtime {show_bytes(others)}), "
        f"{show_bytes(plan.available.num_bytes)} is available: {plan.available.reason}; {', or '.join(changes)}",
        needed_bytes=plan.needed_bytes,
        available_bytes=plan.available.num_bytes,
    )


def show_bytes(num_bytes: int) -> str:
    """A size for people, in binary units."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit in ("B", "KiB") else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"
