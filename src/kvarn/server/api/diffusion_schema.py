"""How a diffusion model denoises, as a field of bodies: kvarn.DiffusionParams by the same names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from kvarn.diffusion import (
    MAX_POOL_KERNEL,
    MAX_POST_EDIT_STEPS,
    Cache,
    CanvasKind,
    DiffusionParams,
    Policy,
    SparseConfig,
)
from kvarn.server.api.schema import Body

INT31 = 2**31 - 1
Probability = Annotated[float, Field(ge=0, le=1)]
DecimalIndex = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})$")]
MAX_PINNED = 16_384
PinnedText = Annotated[str, StringConstraints(min_length=1, max_length=1 << 18)]


class SparseBody(Body):
    """Which keys and values cache "sparse" keeps."""

    enabled: bool | None = None
    retention_ratio: float | None = Field(None, gt=0, le=1, description="Share of the tokens outside the block")
    delay_step: int | None = Field(None, ge=0, le=INT31, description="The step of each block that chooses them")
    default_block_len: int | None = Field(None, ge=1, le=INT31)
    pool_kernel: int | None = Field(None, ge=1, le=MAX_POOL_KERNEL, description="Odd")
    head_select: bool | None = Field(None, description="Every KV head keeps its own")


class DiffusionBody(Body):
    """Refused by models that write from left to right. null is the same as leaving a field out."""

    steps: int | None = Field(None, ge=1, le=INT31, description="Over the whole answer; default: one for each token")
    block_length: int | None = Field(None, ge=1, le=INT31)
    sub_block_length: int | None = Field(None, ge=1, le=INT31, description="Parts of a block, filled one by one")
    policy: Policy | None = Field(None, description="Which positions a step fills; default low_confidence")
    threshold: Probability | None = None
    factor: float | None = Field(None, ge=0, le=1e6)
    entropy_threshold: float | None = Field(None, ge=0, le=100)
    relaxed_threshold: Probability | None = None
    radius: int | None = Field(None, ge=1, le=INT31)
    low_threshold: Probability | None = None
    edit_threshold: Probability | None = Field(None, description="joint_threshold: filled tokens of a block may change")
    max_post_edit_steps: int | None = Field(None, ge=0, le=MAX_POST_EDIT_STEPS)
    cache: Cache | None = None
    canvas: CanvasKind | None = None
    sparse: SparseBody | None = None
    cfg_scale: float | None = Field(None, ge=0, le=100)
    alg_temp: float | None = Field(None, ge=0, le=100)
    pinned: (
        Annotated[dict[DecimalIndex, Annotated[int, Field(ge=0, le=INT31)] | PinnedText], Field(max_length=MAX_PINNED)]
        | None
    ) = Field(None, description="Index in the answer to the token that stands there, or to the text from there on")
    events: bool | None = Field(None, description="In streams: a chunk with the canvas after each step")

    def params(self) -> DiffusionParams:
        """The same as the engine takes it; InvalidParameter where fields contradict each other."""
        given: dict[str, Any] = self.model_dump(exclude_none=True)
        if self.sparse is not None:
            given["sparse"] = SparseConfig(**given["sparse"])
        if self.pinned is not None:
            given["pinned"] = {int(index): pinned for index, pinned in self.pinned.items()}
        return DiffusionParams(**given)
