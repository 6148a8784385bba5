"""A sample as one key may see it: its own requests in detail, those of others as counts, blocks as runs of states."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.kv.pool import HELD
from kvarn.server.chat.generation import Generation
from kvarn.server.live.engine_snapshot import EngineSnapshot
from kvarn.server.live.sampler import LiveSample
from kvarn.server.models.catalog import CatalogEntry

OWN = 4  # beside the states of kvarn.kv.pool: held by a request of the key that watches
LETTERS = "fcuso"  # free, cached, used, shared, own


def frame(
    sample: LiveSample, entries: Iterable[CatalogEntry], own: Sequence[Generation], last_step: dict[str, int]
) -> dict[str, Any]:
    """One event of /v1/live. last_step: the steps of each model that were told before; updated."""
    return {
        "object": "live",
        "models": [_model(entry, sample, own, last_step) for entry in entries],
        "requests": [_request(one) for one in own],
    }


def _model(
    entry: CatalogEntry, sample: LiveSample, own: Sequence[Generation], last_step: dict[str, int]
) -> dict[str, Any]:
    snapshot = sample.engines.get(entry.id) if entry.is_loaded else None
    fields = {
        "id": entry.id,
        "kind": entry.kind,
        "is_loaded": entry.is_loaded,
        "needed_bytes": entry.needed_bytes,
        "context": entry.context,
        "engine": None,
    }
    if snapshot is None:
        return fields
    mine = [one for one in own if one.model.llm is sample.models[entry.id].llm]  # perhaps under another id
    told = last_step.get(entry.id, 0)
    last_step[entry.id] = snapshot.stats.steps
    return {**fields, "engine": _engine(snapshot, mine, told)}


def _engine(snapshot: EngineSnapshot, own: Sequence[Generation], told: int) -> dict[str, Any]:
    stats = snapshot.stats
    # Of the same moment as the counts of all: what a request tells of itself may be some steps ahead.
    mine = [snapshot.is_running[id] for one in own for id in one.engine_ids if id in snapshot.is_running]
    first = stats.steps - len(stats.recent_steps)
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "others_running": stats.running - sum(mine),
        "others_waiting": max(0, stats.waiting - mine.count(False)),
        "tokens_per_s": round(stats.tokens_per_s, 2) if stats.running else 0.0,
        "step_s": round(stats.step_s, 5),
        "generated_tokens": stats.generated_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "prefix_query_tokens": stats.prefix_query_tokens,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "preemptions": stats.preemptions,
        "evictions": stats.evictions,
        "num_steps": stats.steps,
        "steps": [
            [number, one.num_requests, one.prompt_tokens, one.generated_tokens, round(one.seconds, 5)]
            for number, one in enumerate(stats.recent_steps, first + 1)
            if number > told
        ],
        "kv": _blocks(snapshot, own),
        "window_blocks": [stats.window_blocks_used, stats.window_blocks_total],
        "state_slots": [stats.state_slots_used, stats.state_slots_total],
    }


def _blocks(snapshot: EngineSnapshot, own: Sequence[Generation]) -> dict[str, Any]:
    stats, states = snapshot.stats, snapshot.block_states.copy()
    held = [
        block_id for one in own for engine_id in one.engine_ids for block_id in snapshot.held_ids.get(engine_id, ())
    ]
    mine = np.array(held, np.int64)
    states[mine[states[mine] == HELD]] = OWN
    return {
        "block_size": stats.block_size,
        "num_blocks": stats.blocks_total,
        "used": stats.blocks_used,
        "cached": stats.blocks_cached,
        "shared": stats.blocks_shared,
        "free": stats.blocks_total - stats.blocks_used - stats.blocks_cached,
        "own": int((states == OWN).sum()),
        "map": run_lengths(states),
    }


def run_lengths(states: npt.NDArray[np.uint8]) -> str:
    """The states in order of block ids, a letter and how many blocks in a row: `o3f120c8`."""
    if not len(states):
        return ""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(states)) + 1])
    lengths = np.diff(np.append(starts, len(states)))
    return "".join(f"{LETTERS[state]}{length}" for state, length in zip(states[starts], lengths, strict=True))


def _request(generation: Generation) -> dict[str, Any]:
    usage, (computed, _) = generation.usage(), generation.prompt_progress
    request = generation.request
    return {
        "id": request.id,
        "model": generation.model.id,
        "phase": generation.phase,
        "priority": generation.priority,
        "elapsed_s": round(time.monotonic() - request.received_at, 3),
        "deadline_s": round(max(0.0, request.deadline.left_s), 3),
        "prompt_tokens": usage.prompt_tokens,
        "prompt_tokens_computed": computed,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "is_cancelled": generation.is_cancelled,
    }
