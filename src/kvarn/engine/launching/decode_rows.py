"""The steady state: one token more for each of many requests, step after step, as arrays.

Such a step is the last one with every position one further. Whatever else happens (a prompt, a draft, a choice that
depends on the tokens before it) takes the scheduler's ordinary way; entries are made for it when somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import NO_TOKEN, Batch, Int32, RowsAt, Sampled, SampleRows, chosen_token
from kvarn.decoding.decoder import Commit, Decoder, LaunchingDecoder, Span
from kvarn.engine.scheduling.plan import BatchEntry, EntryRows, StepPlan, adapters_of, pad_tables
from kvarn.kv.cache import KVCache
from kvarn.request import Request


@dataclass(frozen=True, slots=True)
class Members:
    """The requests of such steps, and what stays the same about them; arrays have one entry for each."""

    requests: list[Request]
    choices: SampleRows  # at any position
    limits: Int32  # max_total_tokens
    has_plain_text: npt.NDArray[np.bool_]  # all that is wanted of a token is its own text, if that
    stop_ids: Int32  # of any of them
    block_size: int


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """One such step."""

    members: Members
    batch: Batch
    versions: list[int]  # of the block tables in the batch ...
    num_preemptions: int  # ... while there have been so many: who starts again has another table

    @property
    def requests(self) -> list[Request]:
        return self.members.requests

    @property
    def choices(self) -> SampleRows:
        """What the next tokens depend on."""
        choices = self.members.choices
        return replace(choices, params=RowsAt(tuple(choices.params), self.batch.positions + np.int32(1)))

    def spans(self, rows: Sequence[int]) -> list[Span]:
        """Of some rows."""
        starts, token_ids = self.batch.positions.tolist(), self.batch.token_ids.tolist()
        requests = self.requests
        return [Span(requests[i], starts[i], (token_ids[i],), (0,)) for i in rows]

    def entries(self) -> tuple[BatchEntry, ...]:
        """The same step as the scheduler would have planned it."""
        spans = self.spans(range(len(self.requests)))
        ends = [span.start // self.members.block_size + 1 for span in spans]
        tables, windows = self.batch.block_tables, self.batch.window_tables
        return tuple(
            BatchEntry(span, tables[i, :end], window_table=None if windows is None else windows[i, :end])
            for i, (span, end) in enumerate(zip(spans, ends, strict=True))
        )

    def outcome(
        self, sampled: Sampled, decoder: LaunchingDecoder, apart: Sequence[int] = ()
    ) -> tuple[list[Commit], PlainTokens]:
        """What was chosen: plain tokens, and commits of other rows; of those apart, neither."""
        is_plain, requests = self._plain_rows(sampled.token_ids), self.requests
        if not apart and is_plain.all():
            return [], PlainTokens(requests, sampled.token_ids.tolist())
        is_plain[list(apart)] = False
        plain = np.flatnonzero(is_plain).tolist()
        others = np.setdiff1d(np.flatnonzero(~is_plain), apart).tolist()
        commits = decoder.commits_of(list(zip(others, self.spans(others), strict=True)), sampled)
        return commits, PlainTokens([requests[i] for i in plain], sampled.token_ids[plain].tolist())

    def _plain_rows(self, token_ids: Int32) -> npt.NDArray[np.bool_]:
        """Rows that only append what they chose: no end, no stop string to look for."""
        members, ends = self.members, self.batch.positions + 1
        is_plain: npt.NDArray[np.bool_] = members.has_plain_text & (token_ids != NO_TOKEN) & (ends + 1 < members.limits)
        if len(members.stop_ids):
            is_plain &= ~np.isin(token_ids, members.stop_ids)
        return is_plain


@dataclass(frozen=True, slots=True)
class PlainTokens:
    """Tokens of requests to which nothing else happened in a step."""

    requests: Sequence[Request] = ()
    token_ids: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.requests)


NO_PLAIN_TOKENS = PlainTokens()


def compute_decodes(rows: EntryRows, decoder: Decoder) -> tuple[list[Commit], PlainTokens]:
    """Run such a step where the backend does not run ahead: see DecodeRows.outcome()."""
    steady, waiting = cast(DecodeRows, rows), cast(LaunchingDecoder, decoder)
    return steady.outcome(waiting.compute_rows(steady.batch, steady.choices), waiting)


class SteadyDecodes:
    """Plans such steps; between two of them of the same requests, only what has changed is looked at."""

    def __init__(self, decoder: Decoder, kv: KVCache) -> None:
        self._decoder = cast(LaunchingDecoder, decoder)  # else nothing is asked of it
        self._kv = kv

    def plan(self, decodes: Sequence[Request], newest: StepPlan | None, num_preemptions: int) -> StepPlan | None:
        """One token more for each, if all are steady and there are blocks for them.

        newest: the step before this one; num_preemptions: of all requests, ever.
        """
        requests = [one for one in decodes if one.num_computed + one.num_launched + 1 < one.max_total_tokens]
        last = None if newest is None else cast("DecodeRows | None", newest.decodes)
        if last is None or last.requests != requests or last.num_preemptions != num_preemptions:
            last = self._begin(requests, num_preemptions)
        if last is None:
            return None
        starts = [one.num_computed + one.num_launched for one in requests]
        versions = self._kv.extend_each([one.id for one in requests], starts)
        if versions is None:
            return None
        changed = [i for i, (new, old) in enumerate(zip(versions, last.versions, strict=True)) if new != old]
        names, windows = [requests[i].id for i in changed], last.batch.window_tables
        if windows is not None:
            new = [found for found in map(self._kv.window_ids, names) if found is not None]
            windows = _refreshed(windows, changed, new)
        positions = np.array(starts, np.int32)
        batch = replace(
            last.batch,
            token_ids=_token_ids(requests, starts),
            positions=positions,
            context_lens=positions + np.int32(1),
            block_tables=_refreshed(last.batch.block_tables, changed, [*map(self._kv.block_ids, names)]),
            window_tables=windows,
        )
        return StepPlan((), batch, decodes=replace(last, batch=batch, versions=versions))

    def _begin(self, requests: list[Request], num_preemptions: int) -> DecodeRows | None:
        """What all such steps of these requests have in common; None: not all of them are steady."""
        decoder = self._decoder
        if not requests or not decoder.runs_ahead or not all(map(decoder.is_steady, requests)):
            return None
        stop_ids = {token_id for request in requests for token_id in decoder.stop_ids(request)}
        members = Members(
            requests,
            decoder.steady_rows(requests),
            np.array([request.max_total_tokens for request in requests], np.int32),
            np.array([not request.params.stop and request.params.logprobs is None for request in requests]),
            np.array(sorted(stop_ids), np.int32),
            self._kv.block_size,
        )
        starts = np.arange(len(requests) + 1, dtype=np.int32)
        no_tables, has_windows = np.empty((len(requests), 0), np.int32), len(self._kv.groups) > 1
        batch = Batch(
            token_ids=starts[:-1],  # this and the next three are those of every step's own
            positions=starts[:-1],
            context_lens=starts[:-1],
            block_tables=no_tables,
            row_starts=starts,
            output_rows=starts[:-1],
            window_tables=no_tables if has_windows else None,
            adapters=adapters_of(requests),
        )
        return DecodeRows(members, batch, [-1] * len(requests), num_preemptions)


def _token_ids(requests: Sequence[Request], starts: Sequence[int]) -> Int32:
    """Tokens at these positions; chosen_token() where a step under way chooses them."""
    found = [
        request.token_ids[start] if start < len(request.token_ids) else chosen_token(request.chosen_row)
        for request, start in zip(requests, starts, strict=True)
    ]
    return np.array(found, np.int32)


def _refreshed(tables: Int32, changed: Sequence[int], new: Sequence[Int32]) -> Int32:
    """Block tables with those rows that have changed as they are now."""
    if not changed:
        return tables
    width = max(len(table) for table in new)
    if width > tables.shape[1]:
        wider = np.full((len(tables), width), -1, np.int32)
        wider[:, : tables.shape[1]] = tables
        tables = wider
    tables = tables.copy()
    rows = pad_tables(new)
    tables[changed, : rows.shape[1]] = rows
    tables[changed, rows.shape[1] :] = -1
    return tables
