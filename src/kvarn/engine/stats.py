"""What an engine is doing, in numbers, and the meter that counts its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvarn.decoding.decoder import Decoder
from kvarn.decoding.speculation.speculation import DraftCounts
from kvarn.engine.persistence.disk_prefixes import DiskStats
from kvarn.engine.scheduling.scheduler import Scheduler
from kvarn.kv.cache import KVCache
from kvarn.observe.histogram import TOKENS, Histogram, HistogramSnapshot

NUM_RECENT = 64  # steps that "recent" figures look back on


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One step, measured."""

    seconds: float
    backend_s: float
    prompt_tokens: int
    generated_tokens: int
    num_requests: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment of an engine. Token and step counts are since the start, rates over the last 64 steps."""

    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int  # findable and free: they give way when room is needed
    blocks_shared: int  # held by more than one request
    prefix_hit_tokens: int  # prompt tokens that were not computed because they lay in the cache
    evictions: int  # of cached blocks
    preemptions: int
    steps: int
    retried_steps: int  # failed in the backend and were computed again request by request
    prompt_tokens: int  # computed; those of preempted requests count again
    generated_tokens: int
    tokens_per_s: float  # generated
    step_s: float  # median
    overhead_share: float  # of step time outside the backend: scheduling, text, Python
    block_size: int = 1  # tokens
    waiting_for_prompt: int = 0  # of those waiting: further answers to a prompt that is being computed
    prefix_query_tokens: int = 0  # prompt tokens that were looked up in the prefix cache
    window_blocks_total: int = 0  # of layers that keep a window only; 0: there are none
    window_blocks_used: int = 0
    state_slots_total: int = 0  # of recurrent layers; 0: there are none
    state_slots_used: int = 0
    denoise_steps: int = 0  # passes that filled positions of a diffusion model's answers
    drafts: int = 0  # times that guessed tokens of a request were computed
    draft_tokens: int = 0  # so many of them
    accepted_per_position: tuple[int, ...] = ()  # those that were right, by their place in the guess
    recent_steps: tuple[StepTiming, ...] = ()  # the last ones, oldest first
    disk: DiskStats = field(default_factory=DiskStats)  # the prefix cache on disk; zeros where there is none
    distributions: Mapping[str, HistogramSnapshot] = field(default_factory=dict, repr=False)  # by metric name

    @property
    def draft_totals(self) -> Mapping[str, float]:
        """Of guessed tokens, by metric name."""
        return {
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_num_draft_tokens": self.draft_tokens,
            "spec_decode_num_accepted_tokens": sum(self.accepted_per_position),
        }


class StepMeter:
    """Counts steps; remembers the last ones."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_retried = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.step_tokens = Histogram(TOKENS)
        self._recent: deque[StepTiming] = deque(maxlen=NUM_RECENT)

    def add(self, step: StepTiming) -> None:
        self.num_steps += 1
        self.prompt_tokens += step.prompt_tokens
        self.generated_tokens += step.generated_tokens
        self.step_tokens.observe(step.prompt_tokens + step.generated_tokens)
        self._recent.append(step)

    @property
    def recent(self) -> tuple[StepTiming, ...]:
        """The last steps, oldest first."""
        return tuple(self._recent)

    @property
    def tokens_per_s(self) -> float:
        return sum(step.generated_tokens for step in self._recent) / self._seconds if self._recent else 0.0

    @property
    def step_s(self) -> float:
        ordered = sorted(step.seconds for step in self._recent)
        return ordered[len(ordered) // 2] if ordered else 0.0

    @property
    def overhead_share(self) -> float:
        return 1.0 - sum(step.backend_s for step in self._recent) / self._seconds if self._recent else 0.0

    @property
    def _seconds(self) -> float:
        return max(sum(step.seconds for step in self._recent), 1e-9)


def engine_stats(scheduler: Scheduler, cache: KVCache, decoder: Decoder, meter: StepMeter) -> EngineStats:
    """What an engine holds and how fast it is."""
    drafts = DraftCounts() if decoder.speculation is None else decoder.speculation.counts
    kv, windows = cache.stats(), [cache.stats(group) for group in range(1, len(cache.groups))]
    return EngineStats(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        blocks_total=kv.num_blocks,
        blocks_used=kv.used,
        blocks_cached=kv.cached,
        blocks_shared=kv.shared,
        prefix_hit_tokens=scheduler.prefix_reuse.num_hit_tokens,
        evictions=kv.evictions,
        preemptions=scheduler.num_preemptions,
        steps=meter.num_steps,
        retried_steps=meter.num_retried,
        prompt_tokens=meter.prompt_tokens,
        generated_tokens=meter.generated_tokens,
        tokens_per_s=meter.tokens_per_s,
        step_s=meter.step_s,
        overhead_share=meter.overhead_share,
        block_size=cache.block_size,
        waiting_for_prompt=scheduler.num_forks,
        prefix_query_tokens=scheduler.prefix_reuse.num_query_tokens,
        window_blocks_total=sum(group.num_blocks for group in windows),
        window_blocks_used=sum(group.used for group in windows),
        state_slots_total=0 if cache.states is None else cache.states.num_slots,
        state_slots_used=0 if cache.states is None else cache.states.num_used,
        denoise_steps=decoder.num_denoise_steps,
        drafts=drafts.num_drafts,
        draft_tokens=drafts.num_draft_tokens,
        accepted_per_position=tuple(drafts.accepted_per_position),
        recent_steps=meter.recent,
        disk=scheduler.prefix_reuse.restores.stats(),
        distributions={"iteration_tokens_total": meter.step_tokens.snapshot(), **cache.histograms()},
    )
