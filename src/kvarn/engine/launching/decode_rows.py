"""The steady state of a device that runs ahead: one token more for each of many requests, step after step, as arrays.

The next step is the last one with every position one further. Whatever else happens (a prompt, an end, a preemption, a
choice that depends on the last token) takes the scheduler's ordinary way, and the entries are made for it when asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from kvarn.backends.batch import NO_TOKEN, Batch, Int32, chosen_token
from kvarn.decoding.decoder import Decoder, LaunchingDecoder, Span
from kvarn.engine.scheduling.plan import BatchEntry, StepPlan, pad_tables
from kvarn.kv.cache import KVCache
from kvarn.request import Request, RequestState


@dataclass(frozen=True, slots=True)
class Members:
    """The requests of such steps, and what stays the same about them; lists and arrays have one entry for each."""

    requests: list[Request]
    limits: Int32  # max_total_tokens
    has_plain_text: npt.NDArray[np.bool_]  # all that is wanted of a token is its own text, if that
    stop_ids: Int32  # of any of them
    num_preemptions: list[int]  # of each; when one has changed, a step under way is not whole any more
    num_late: list[int]
    block_size: int

    def touched(self) -> list[int]:
        """Those that have ended, been preempted or been late since."""
        marks = zip(self.requests, self.num_preemptions, self.num_late, strict=True)
        return [
            i
            for i, (request, preemptions, late) in enumerate(marks)
            if request.state is not RequestState.RUNNING
            or request.num_preemptions != preemptions
            or request.num_late != late
        ]

    def only(self, rows: Sequence[int]) -> Members:
        """Some of them."""
        return Members(
            [self.requests[i] for i in rows],
            self.limits[rows],
            self.has_plain_text[rows],
            self.stop_ids,
            [self.num_preemptions[i] for i in rows],
            [self.num_late[i] for i in rows],
            self.block_size,
        )


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """One such step."""

    members: Members
    batch: Batch
    versions: list[int]  # of the block tables in the batch

    @property
    def requests(self) -> list[Request]:
        return self.members.requests

    def only(self, rows: Sequence[int]) -> DecodeRows:
        """Some of them, whose tokens the device keeps where it has them."""
        starts = np.arange(len(rows) + 1, dtype=np.int32)
        batch = replace(
            self.batch,
            token_ids=np.array([chosen_token(i) for i in rows], np.int32),
            positions=self.batch.positions[rows],
            row_starts=starts,
            context_lens=self.batch.context_lens[rows],
            block_tables=self.batch.block_tables[rows],
            window_tables=None if self.batch.window_tables is None else self.batch.window_tables[rows],
            output_rows=starts[:-1],
            adapters=tuple([self.batch.adapters[i] for i in rows]) if self.batch.adapters else (),
        )
        return DecodeRows(self.members.only(rows), batch, [self.versions[i] for i in rows])

    def spans(self, rows: Sequence[int]) -> list[Span]:
        """Of some rows."""
        starts, token_ids = self.batch.positions.tolist(), self.batch.token_ids.tolist()
        return [Span(self.requests[i], starts[i], (token_ids[i],), (0,)) for i in rows]

    def entries(self) -> tuple[BatchEntry, ...]:
        """The same step as the scheduler would have planned it."""
        spans = self.spans(range(len(self.requests)))
        ends = [span.start // self.members.block_size + 1 for span in spans]
        tables, windows = self.batch.block_tables, self.batch.window_tables
        return tuple(
            BatchEntry(span, tables[i, :end], window_table=None if windows is None else windows[i, :end])
            for i, (span, end) in enumerate(zip(spans, ends, strict=True))
        )

    def plain_rows(self, token_ids: Int32) -> npt.NDArray[np.bool_]:
        """Rows that only append what they chose: no end, no stop string to look for, no block that became full."""
        members, ends = self.members, self.batch.positions + 1
        is_plain: npt.NDArray[np.bool_] = members.has_plain_text & (token_ids != NO_TOKEN) & (ends + 1 < members.limits)
        is_plain &= ends % members.block_size != 0
        if len(members.stop_ids):
            is_plain &= ~np.isin(token_ids, members.stop_ids)
        return is_plain


class SteadyDecodes:
    """Plans the next of such steps from the one under way."""

    def __init__(self, decoder: Decoder, kv: KVCache) -> None:
        self._decoder = cast(LaunchingDecoder, decoder)  # asked only when a step is under way
        self._kv = kv

    def next(self, newest: StepPlan, decodes: Sequence[Request]) -> StepPlan | None:
        """The step after the one launched last, if all of these requests are in it and nothing else is new."""
        rows = newest.decodes
        last = self._begin(newest) if rows is None else cast(DecodeRows, rows)
        left = None if last is None else self._going_on(last, decodes)
        if last is None or not left:
            return None
        if len(left) < len(last.requests):
            last = last.only(left)
            token_ids = last.batch.token_ids
        else:
            token_ids = _chosen_ids(len(left))
        starts = last.batch.positions + np.int32(1)
        expected = starts.tolist()
        if [request.num_computed + request.num_launched for request in last.requests] != expected:
            return None
        versions = self._kv.extend_each([request.id for request in last.requests], expected)
        if versions is None:
            return None
        changed = [i for i, (new, old) in enumerate(zip(versions, last.versions, strict=True)) if new != old]
        changed_ids = [last.requests[i].id for i in changed]
        windows = last.batch.window_tables
        if windows is not None:
            windows = _refreshed(windows, changed, [self._window_ids(sequence) for sequence in changed_ids])
        batch = replace(
            last.batch,
            token_ids=token_ids,
            positions=starts,
            context_lens=starts + np.int32(1),
            block_tables=_refreshed(last.batch.block_tables, changed, [*map(self._kv.block_ids, changed_ids)]),
            window_tables=windows,
        )
        return StepPlan((), batch, decodes=DecodeRows(last.members, batch, versions))

    def _going_on(self, last: DecodeRows, decodes: Sequence[Request]) -> list[int] | None:
        """Rows of the last step that have a next one; None: not all of the requests are in it, or in another order."""
        does_end = (last.batch.positions + 2 >= last.members.limits).tolist()  # with the token under way
        if last.requests == decodes:
            return [i for i, ends in enumerate(does_end) if not ends]
        place = {request.id: i for i, request in enumerate(last.requests)}
        rows = [place.get(request.id, -1) for request in decodes]
        if -1 in rows or rows != sorted(rows):
            return None
        return [i for i in rows if not does_end[i]]

    def _begin(self, newest: StepPlan) -> DecodeRows | None:
        """The step under way, which was planned in the ordinary way, if such steps may follow it."""
        spans, decoder = newest.spans, self._decoder
        if newest.batch is None or newest.layerwise is not None:
            return None
        for index, span in enumerate(spans):
            request = span.request
            if len(span.token_ids) != 1 or span.outputs != (0,) or span.reach is not None:
                return None
            if request.chosen_row != index or not decoder.is_steady(request):
                return None
        requests = [span.request for span in spans]
        stop_ids = {token_id for request in requests for token_id in decoder.stop_ids(request)}
        members = Members(
            requests,
            np.array([request.max_total_tokens for request in requests], np.int32),
            np.array([not request.params.stop and request.params.logprobs is None for request in requests]),
            np.array(sorted(stop_ids), np.int32),
            [request.num_preemptions for request in requests],
            [request.num_late for request in requests],
            self._kv.block_size,
        )
        return DecodeRows(members, newest.batch, [-1] * len(requests))

    def _window_ids(self, sequence: str) -> Int32:
        found = self._kv.window_ids(sequence)
        assert found is not None, "a batch has window tables, its cache has not"
        return found


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


def _chosen_ids(count: int) -> Int32:
    return np.fromiter(map(chosen_token, range(count)), np.int32, count)


@dataclass(frozen=True, slots=True)
class PlainTokens:
    """Tokens of requests to which nothing else happened in a step."""

    requests: Sequence[Request] = ()
    token_ids: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.requests)


NO_PLAIN_TOKENS = PlainTokens()
