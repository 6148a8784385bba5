"""The memory plan: the bytes a model will need against those available, before any of it is loaded.

The KV cache is reserved as address space; its pages are taken as tokens fill them. The plan counts it in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvarn.config import EngineConfig
from kvarn.errors import ConfigError, DoesNotFit
from kvarn.formats.recast_weights import DenseWeights, Q8Weights
from kvarn.formats.weights import WeightSource
from kvarn.machine import MemoryAvailable
from kvarn.models.cache_cost import CacheCost, cache_cost
from kvarn.models.diffusion.uniform import UniformDiffusion
from kvarn.models.recurrent import (
    MIN_STATES,
    SLOTS_OF_SEQUENCE,
    Recurrent,
    conv_channels,
    kv_layers,
    latent_layers,
    state_layers,
)
from kvarn.models.spec import Attention, Encoder, FeedForward, LatentAttention, ModelSpec
from kvarn.models.state_layers import Mamba, Mamba2, NoMixer, ShortConv

RUNTIME_BYTES = 64 << 20  # interpreter, libraries, template helper
TOKENIZER_BYTES_PER_TOKEN = 256  # measured on vocabularies of 49k to 262k entries
KV_SHARE = 0.8  # of the memory left beside the weights, when no size of the cache is given
CACHE_TOKENS = 8192  # at least, where they fit, so that a model of a short context serves several requests, too
MIN_CONTEXT = 256  # a model that cannot hold this much is refused
BATCH_TOKENS = 512
STATE_SHARE = 0.25  # of the memory left beside the weights, at most, for recurrent states
KV_VALUE_BYTES = {"f16": 2, "f32": 4, "bf16": 2, "fp8": 1}
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
    cost: CacheCost  # of kv_bytes
    note: str | None = None  # why context is less than the model's, if it is
    num_states: int = 0  # slots for the states of recurrent layers
    state_bytes: int = 0  # of all of them, or of what the steps of running canvases feed back
    draft_bytes: int = 0  # of a draft model, with its cache
    lora_bytes: int = 0  # for adapters, as many as will be loaded

    @property
    def max_sequences(self) -> int:
        """Requests at once for which there are slots; one more text can be scored beside them."""
        return max(1, self.num_states // SLOTS_OF_SEQUENCE - 1)

    @property
    def needed_bytes_without_cache(self) -> int:
        return self._held_bytes + self.scratch_bytes

    @property
    def needed_bytes(self) -> int:
        """The most that is in use at one time."""
        cache_bytes = self.kv_bytes + self.state_bytes
        return self._held_bytes + max(self.repack_bytes, cache_bytes + self.scratch_bytes)

    @property
    def _held_bytes(self) -> int:
        return self.weights_bytes + self.draft_bytes + self.lora_bytes + self.runtime_bytes


def held_weights(spec: ModelSpec, weights: WeightSource, config: EngineConfig) -> WeightSource:
    """Return the weights to load: an encoder's floats as q8_0, all else as in the file.

    The reference backend is the definition, so it keeps the floats, too.
    """
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
    max_running: int = 64,
    window_step: int | None = None,
    draft_bytes: int = 0,
    lora_bytes: int = 0,
    step_rows: int = BATCH_TOKENS,
    remedies: Sequence[str] = (),  # what else would make it fit
) -> MemoryPlan:
    """Size the weights, the KV cache and the rest, or refuse with the numbers and the cheapest changes.

    window_step: rows of a step, where layers with a window free what lies before it; None: they keep all.
    """
    _check_context(spec, context)
    cost = cache_cost(spec, kv_layer_bytes(kv_layers(spec), latent_layers(spec), kv_dtype), window_step)
    fixed = replace(
        _without_cache(spec, weights, available, cost, max(step_rows, BATCH_TOKENS)),
        draft_bytes=draft_bytes,
        lora_bytes=0 if isinstance(spec.generation, Encoder) else lora_bytes,
    )
    left_bytes = available.num_bytes - fixed.needed_bytes_without_cache
    asked_bytes = kv_bytes if kv_bytes is not None else cost.least_bytes(context or 0)
    fixed = _with_states(fixed, spec, max_running, min(int(left_bytes * STATE_SHARE), left_bytes - asked_bytes))
    left_bytes -= fixed.state_bytes
    cache = _choose_cache(spec, context, kv_bytes, cost, left_bytes)
    plan = replace(fixed, context=cache.context, kv_bytes=cache.num_bytes, note=cache.note)
    if plan.needed_bytes > available.num_bytes:
        raise _refusal(plan, left_bytes, remedies)
    return plan


def _without_cache(
    spec: ModelSpec, weights: WeightSource, available: MemoryAvailable, cost: CacheCost, step_rows: int
) -> MemoryPlan:
    """What a model takes before anything is cached."""
    return MemoryPlan(
        weights_bytes=held_bytes(weights),
        repack_bytes=2 * max((info.num_bytes for info in weights.tensors.values()), default=0),
        kv_bytes=0,
        scratch_bytes=scratch_bytes(spec, step_rows),
        runtime_bytes=RUNTIME_BYTES + spec.vocab_size * TOKENIZER_BYTES_PER_TOKEN,
        available=available,
        context=0,
        cost=cost,
    )


def held_bytes(weights: WeightSource) -> int:
    """What weights take in memory."""
    if isinstance(weights, DenseWeights):
        return weights.held_bytes
    return sum(info.num_bytes for info in weights.tensors.values())


def _with_states(plan: MemoryPlan, spec: ModelSpec, max_running: int, most_bytes: int) -> MemoryPlan:
    """Slots for the states of recurrent layers: for the requests that run, and for snapshots.

    No more than most_bytes, and never fewer than one request needs.
    """
    if isinstance(spec.generation, UniformDiffusion):  # what steps feed back: of those that run, and of one step
        rows = spec.generation.canvas * max_running + BATCH_TOKENS
        return replace(plan, state_bytes=4 * rows * spec.width)
    slot_bytes = 4 * sum(state_layers(spec))
    if slot_bytes == 0:
        return plan
    count = min(SLOTS_OF_SEQUENCE * (max_running + 1), max(MIN_STATES, most_bytes // slot_bytes))
    return replace(plan, num_states=count, state_bytes=count * slot_bytes)


def kv_token_bytes(spec: ModelSpec, dtype: str = "f16") -> int:
    """K and V of one token in all layers."""
    return sum(kv_layer_bytes(kv_layers(spec), latent_layers(spec), dtype))


def kv_layer_bytes(layers: tuple[tuple[int, int], ...], latent: tuple[bool, ...], dtype: str) -> list[int]:
    """K and V of one token, by layers of these (KV heads, head_dim); latent ones have their V within K."""
    is_latent = latent or (False,) * len(layers)
    return [
        (1 if is_one else 2) * heads * kv_head_bytes(dim, dtype)
        for (heads, dim), is_one in zip(layers, is_latent, strict=True)
    ]


def kv_head_bytes(head_dim: int, dtype: str) -> int:
    """K, or V, of one head of one token."""
    if dtype == "q8_0":
        return head_dim + 2 * -(-head_dim // Q8_GROUP)
    return head_dim * KV_VALUE_BYTES[dtype]


def scratch_bytes(spec: ModelSpec, batch_tokens: int = BATCH_TOKENS) -> int:
    """Activations of the widest layer for one full batch in f32, and two rows of logits."""
    widest = 0
    for block in spec.blocks:
        ffn, heads = block.feed_forward, _mixer_floats(block.mixer) + (_mixer_floats(block.state) if block.state else 0)
        hidden = ffn.hidden if isinstance(ffn, FeedForward) else ffn.hidden * ffn.num_active
        if not isinstance(ffn, FeedForward) and ffn.shared is not None:
            hidden = max(hidden, ffn.shared.hidden)
        if block.beside is not None:
            hidden = max(hidden + spec.width, block.beside.hidden * block.beside.num_active + spec.width)
        widest = max(widest, 4 * spec.width + heads + 2 * hidden)
    per_layer = spec.embedding.per_layer
    widest += 0 if per_layer is None else len(spec.blocks) * per_layer.length
    return 4 * (batch_tokens * widest + 2 * spec.vocab_size)


def _mixer_floats(layer: Attention | LatentAttention | Recurrent | NoMixer) -> int:
    """What a row of an attention, or of what stands in its place, computes."""
    if isinstance(layer, Attention):
        return (2 * layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    if isinstance(layer, LatentAttention):
        heads = layer.nope_dim + layer.rope_dim + layer.row_dim + layer.rank + layer.value_dim
        return layer.num_heads * heads + layer.row_dim + (layer.query_rank or 0)
    if isinstance(layer, NoMixer):
        return 0
    if isinstance(layer, ShortConv):
        return 4 * layer.width
    if isinstance(layer, Mamba2):
        return layer.inputs + conv_channels(layer) + layer.values + 2 * layer.num_heads
    if isinstance(layer, Mamba):
        return 5 * layer.width + 2 * layer.rank + 2 * layer.state_dim
    return conv_channels(layer) + 2 * layer.num_value_heads * layer.value_dim


@dataclass(frozen=True, slots=True)
class _CacheSize:
    context: int
    num_bytes: int
    note: str | None = None


def _choose_cache(
    spec: ModelSpec, context: int | None, kv_bytes: int | None, cost: CacheCost, left_bytes: int
) -> _CacheSize:
    wanted = context or spec.context_length
    if isinstance(spec.generation, Encoder):
        # An encoder computes a text in one batch; room for two batches lets short texts share one.
        return _CacheSize(wanted, cost.least_bytes(2 * max(wanted, BATCH_TOKENS)))
    if kv_bytes is not None:
        return _sized_cache(wanted, kv_bytes, cost, is_context_given=context is not None)
    if context is not None:
        return _CacheSize(context, cost.bytes_within(context, left_bytes))
    share_bytes = max(0, int(left_bytes * KV_SHARE))
    fitting_tokens = cost.tokens_in(share_bytes)
    if fitting_tokens >= wanted or fitting_tokens < MIN_CONTEXT:  # the second case is refused by the caller
        return _CacheSize(wanted, cost.bytes_within(max(wanted, min(CACHE_TOKENS, fitting_tokens)), share_bytes))
    note = f"the model allows {wanted:,} tokens; memory allows {fitting_tokens:,}"
    return _CacheSize(fitting_tokens, cost.least_bytes(fitting_tokens), note)


def _sized_cache(wanted: int, kv_bytes: int, cost: CacheCost, *, is_context_given: bool) -> _CacheSize:
    fitting_tokens = cost.tokens_in(kv_bytes)
    if fitting_tokens >= wanted:
        return _CacheSize(wanted, kv_bytes)
    if is_context_given or fitting_tokens < 1:
        raise ConfigError(
            f"kv_bytes={kv_bytes:,} holds {fitting_tokens:,} tokens, context is {wanted:,}; "
            f"give kv_bytes={cost.least_bytes(wanted):,} or a smaller context="
        )
    return _CacheSize(
        fitting_tokens, kv_bytes, f"the model allows {wanted:,} tokens; kv_bytes holds {fitting_tokens:,}"
    )


def _check_context(spec: ModelSpec, context: int | None) -> None:
    if context is not None and context > spec.context_length:
        raise ConfigError(f"context is {context:,}, the model was made for {spec.context_length:,}; give at most that")


def _refusal(plan: MemoryPlan, left_bytes: int, remedies: Sequence[str]) -> DoesNotFit:
    others, cache_bytes = plan.scratch_bytes + plan.runtime_bytes, plan.kv_bytes + plan.state_bytes
    what = "KV cache and states" if plan.state_bytes else "KV cache"
    beside = f", draft model {show_bytes(plan.draft_bytes)}" if plan.draft_bytes else ""
    beside += f", adapters {show_bytes(plan.lora_bytes)} (lora_bytes)" if plan.lora_bytes else ""
    fitting_tokens = plan.cost.tokens_in(max(0, left_bytes))
    fitting_bytes = plan.cost.least_bytes(fitting_tokens)
    changes = [*remedies, "use a smaller quantisation or model"]
    if fitting_tokens >= plan.context and plan.kv_bytes > left_bytes:  # a cache of several contexts was asked for
        changes.insert(0, f"set kv_bytes={fitting_bytes} or less")
    elif MIN_CONTEXT <= fitting_tokens < plan.context:
        changes.insert(0, f"set context={fitting_tokens} (kv_bytes={fitting_bytes})")
    return DoesNotFit(
        f"the model needs {show_bytes(plan.needed_bytes)} (weights {show_bytes(plan.weights_bytes)}{beside}, "
        f"{what} {show_bytes(cache_bytes)} for {plan.context:,} tokens, scratch and runtime {show_bytes(others)}), "
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
