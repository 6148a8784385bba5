"""Ids that no token has: padding rows of an embedding, and holes in the tokenizer's table. They are never chosen.

Knows ids and masks; the backend samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from kvarn.backends.batch import RowSampling, Sampled, SampleRows, UInt32
from kvarn.backends.protocol import Backend, Hidden
from kvarn.sampling.token_masks import mask_without


@dataclass(frozen=True, slots=True)
class UnusedIds:
    """Those of one model; most have none, and then nothing is done about them."""

    ids: frozenset[int] = frozenset()
    mask: UInt32 | None = None  # of the other ids; None: all may be chosen
    first: int | None = None  # the lowest of them

    @classmethod
    def of(cls, vocab_size: int, ids: Iterable[int]) -> UnusedIds:
        """vocab_size: rows of the logits."""
        unused = frozenset(token_id for token_id in ids if token_id < vocab_size)
        return cls(unused, mask_without(unused, vocab_size), min(unused)) if unused else cls()

    def __contains__(self, token_id: int) -> bool:
        return token_id in self.ids

    def masked(self, row: RowSampling) -> RowSampling:
        """The same choice among the other ids; a constraint's mask leaves these out already."""
        return row if self.mask is None or row.mask is not None else row.at(row.position, mask=self.mask)

    def sample(self, backend: Backend, hidden: Hidden, rows: SampleRows) -> Sampled:
        """Sample in the backend, as if the logits of these ids were -inf."""
        return self.sample_masked(backend, hidden, self.masked_rows(rows))

    def masked_rows(self, rows: SampleRows) -> SampleRows:
        """The same choices among the other ids, for sample_masked()."""
        if self.mask is None:
            return rows
        # Backends have a faster way for greedy rows without a mask. The largest logit of all is also the largest of
        # those allowed, unless one of these ids has it: such a row is sampled again.
        params = tuple([row if row.temperature == 0.0 else self.masked(row) for row in rows.params])
        return replace(rows, params=params)

    def sample_masked(self, backend: Backend, hidden: Hidden, rows: SampleRows) -> Sampled:
        """sample() of what masked_rows() gave."""
        sampled = backend.sample(hidden, rows)
        if self.mask is None:
            return sampled
        again = [i for i, token_id in enumerate(sampled.token_ids.tolist()) if token_id in self.ids]
        return self._replaced(sampled, again, backend, hidden, rows) if again else sampled

    def _replaced(
        self, sampled: Sampled, again: list[int], backend: Backend, hidden: Hidden, rows: SampleRows
    ) -> Sampled:
        partners = None if rows.partners is None else rows.partners[again]
        params = tuple([self.masked(rows.params[i]) for i in again])
        found = backend.sample(hidden, replace(rows, rows=rows.rows[again], params=params, partners=partners))
        token_ids, logprobs = np.array(sampled.token_ids), np.array(sampled.logprobs)
        token_ids[again], logprobs[again] = found.token_ids, found.logprobs
        return replace(sampled, token_ids=token_ids, logprobs=logprobs)  # the rest is of the plain logits


NO_UNUSED_IDS = UnusedIds()
