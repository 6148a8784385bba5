"""The text between two others, from a diffusion model: a slot before the suffix, which is pinned. Knows no engine.

prompt | masked ...  | suffix, pinned |     the answer is what stands in the slot, without what it did not need
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvarn.fill.template import NamedSlot, Parts, Slot
from kvarn.types import Completion, FinishReason, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvarn.fill.layout import CanvasLayout
    from kvarn.tokenizer.tokenizer import Tokenizer

NAME = "middle"


def middle_parts(suffix: str, max_tokens: int | None) -> Parts:
    """The template of a middle: its slot, and what stands after it."""
    slot = NamedSlot(NAME, Slot(max_tokens))
    return (slot, suffix) if suffix else (slot,)


@dataclass(frozen=True, slots=True)
class MiddleReader:
    """Cuts the answer out of a canvas. A space at a seam is written once, by whoever wrote it first."""

    tokenizer: Tokenizer
    layout: CanvasLayout
    after_space: bool  # the prompt ends with one, which is not on the canvas
    before_space: bool  # the suffix begins with one

    def __call__(self, completion: Completion) -> Completion:
        """The same completion, of the middle alone."""
        ids = completion.token_ids[: self.layout.places[NAME].length]
        is_whole = self.layout.null_id in ids
        ids = ids[: ids.index(self.layout.null_id) + 1] if is_whole else ids
        usage, num_suffix = completion.usage, len(self.layout.pinned)
        finish = completion.finish_reason
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            finish = FinishReason.STOP if is_whole else FinishReason.LENGTH
        return replace(
            completion,
            text=self._text(ids[:-1] if is_whole else ids),
            token_ids=ids,
            finish_reason=finish,
            usage=Usage(usage.prompt_tokens + num_suffix, len(ids), usage.cached_tokens),
            alternatives=tuple(self(one) for one in completion.alternatives),
        )

    def _text(self, ids: Sequence[int]) -> str:
        text = b"".join(map(self.tokenizer.token_bytes, ids)).decode("utf-8", "replace")
        text = text.removeprefix(" ") if self.after_space else text
        return text.rstrip(" ") if self.before_space else text
