"""Which pieces of the teacher's vocabulary a small model keeps, so that text is cut into tokens as before."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from teacher import FIRST_BYTE_TOKEN, NUM_BYTE_TOKENS, Piece

NUM_FIXED = FIRST_BYTE_TOKEN + NUM_BYTE_TOKENS  # unknown, beginning, end, and the bytes
LAST_CHARACTER = "\u024f"  # single characters up to the end of Latin Extended-B stay
PADDED_TO = 64  # a matrix product is fast when its sides are multiples of this


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The kept tokens in ascending order of their old ids; the mask token follows them."""

    kept: NDArray[np.int64]

    @property
    def mask_id(self) -> int:
        """The id of the mask token: the last one."""
        return len(self.kept)

    @property
    def size(self) -> int:
        """Kept tokens and the mask token."""
        return len(self.kept) + 1

    def renumber(self, old_vocab: int) -> NDArray[np.int64]:
        """Return the new id of every old one; 0 (unknown) where it was dropped."""
        new_ids = np.zeros(old_vocab, np.int64)
        new_ids[self.kept] = np.arange(len(self.kept))
        return new_ids


def choose_vocabulary(pieces: list[Piece], counts: NDArray[np.int64]) -> Vocabulary:
    """Keep what occurs, the pieces it is merged from, common characters and bytes; fill up with early merges.

    SentencePiece joins the pair with the best score first. A final token is built by joins inside its own
    characters only, so keeping the pieces on that way leaves the encoding of such text unchanged.
    """
    ids = {piece.text: index for index, piece in reversed(list(enumerate(pieces))) if index >= NUM_FIXED}
    kept = set(range(NUM_FIXED))
    kept |= {index for text, index in ids.items() if len(text) == 1 and text <= LAST_CHARACTER}
    for index in np.flatnonzero(counts).tolist():
        kept |= _merge_path(index, pieces, ids)
    for index in range(NUM_FIXED, len(pieces)):
        room = -(len(kept) + 1) % PADDED_TO
        missing = _merge_path(index, pieces, ids) - kept
        if room and len(missing) <= room:
            kept |= missing
    return Vocabulary(np.array(sorted(kept)))


def _merge_path(index: int, pieces: list[Piece], ids: dict[str, int]) -> set[int]:
    if index < NUM_FIXED:
        return {index}
    parts = list(pieces[index].text)
    path = {index} | {ids[part] for part in parts if part in ids}
    while joins := [
        (pieces[ids[joined]].score, -at)
        for at, joined in enumerate(left + right for left, right in pairwise(parts))
        if joined in ids
    ]:
        at = -max(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        path.add(ids[parts[at]])
    return path
