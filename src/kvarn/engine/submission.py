"""What a caller wants computed, as it travels from the client to the scheduler: complete when made, passed on whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvarn.adapters.weights import AdapterUse, prefix_salt
from kvarn.structured.constraints import CanvasSlot, Compiled
from kvarn.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Admitted:
    """The bounds of a submission that was found acceptable."""

    prompt_ids: tuple[int, ...]  # as they will be computed, after truncation
    max_tokens: int  # of each answer

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt_ids) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Submission:
    """One prompt and how it is to be answered; params.n answers are computed."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    starts_text: bool = False  # the answer is the start of a text, as after a chat template
    tenant: str = ""  # salts the prefix cache: tenants never share blocks
    visible_ids: frozenset[int] = frozenset()  # control tokens that count as text, such as the mark of a tool call
    constraint: Compiled | None = None  # params.constraint, compiled for the model's vocabulary
    prediction_ids: tuple[int, ...] = ()  # of params.prediction
    slots: tuple[CanvasSlot, ...] = ()  # of a canvas, each with a constraint of its own
    is_streamed: bool = True  # somebody reads its tokens as they come
    is_polled: bool = False  # who takes them from the request
    adapters: tuple[AdapterUse, ...] = ()  # what is added to the base
    prefix_marks: tuple[tuple[int, int], ...] = ()  # texts of the prompt that a router knows, see kvarn.routing
    admitted: Admitted | None = None  # set by Admission.admit

    @property
    def has_constraints(self) -> bool:
        """Whether something in it was compiled for the model's vocabulary."""
        return self.constraint is not None or bool(self.slots)

    @property
    def prefix_salt(self) -> str:
        """What the prefix cache knows its blocks by."""
        return prefix_salt(self.tenant, self.adapters)

    @property
    def wants_text_alone(self) -> bool:
        """Whether text is all that is told of a token, and no stop string is looked for in it."""
        params = self.params
        return not params.stop and params.logprobs is None and params.diffusion is None
