"""Denoising parameters of a request, and the view of a canvas that a caller gets. Frozen; validated when made.

Knows no model: decoding/denoise_config.py fills in what depends on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvarn.checks import check_parameter, short
from kvarn.errors import InvalidParameter

Policy = Literal[
    "low_confidence",
    "random",
    "origin",
    "maskgit_plus",
    "topk_margin",
    "entropy",
    "threshold",
    "factor",
    "entropy_exit",
    "local_leap",
    "hierarchy",
    "joint_threshold",
]
Cache = Literal["none", "prefix", "dual", "sparse", "block", "sub_block"]
CanvasKind = Literal["fixed", "grow"]

POLICIES: tuple[str, ...] = get_args(Policy)
CACHES: tuple[str, ...] = get_args(Cache)
CANVASES: tuple[str, ...] = get_args(CanvasKind)
# The fields that a policy reads, with the values its authors gave them. Other policies refuse them.
POLICY_FIELDS: Mapping[str, Mapping[str, float]] = {
    "low_confidence": {"alg_temp": 0.0},
    "maskgit_plus": {"alg_temp": 0.0},
    "topk_margin": {"alg_temp": 0.0},
    "entropy": {"alg_temp": 0.0},
    "threshold": {"threshold": 0.9},
    "factor": {"factor": 1.0},
    "entropy_exit": {"entropy_threshold": 1.5},
    "local_leap": {"threshold": 0.9, "relaxed_threshold": 0.75, "radius": 4},
    "hierarchy": {"threshold": 0.9, "low_threshold": 0.4},
    "joint_threshold": {"threshold": 0.5, "edit_threshold": 0.0, "max_post_edit_steps": 16},
}
MAX_POOL_KERNEL = 63
MAX_POST_EDIT_STEPS = 1024


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """cache="sparse": blocks attend to the most relevant part of the keys and values outside them."""

    enabled: bool = True
    retention_ratio: float = 0.5  # of the tokens outside the block that are kept
    delay_step: int = 1  # the step of each block that selects them; steps before it attend to everything
    default_block_len: int = 32  # where block_length is None
    pool_kernel: int = 3  # neighbours that share the largest of their scores; odd
    head_select: bool = True  # every KV head selects its own tokens

    def __post_init__(self) -> None:
        check_parameter.flag("enabled", self.enabled)
        check_parameter.number("retention_ratio", self.retention_ratio, 0.0, 1.0)
        if self.retention_ratio == 0:
            raise InvalidParameter("retention_ratio is 0; give more than 0, up to 1", field="retention_ratio")
        check_parameter.integer("delay_step", self.delay_step, 0, 2**31 - 1)
        check_parameter.integer("default_block_len", self.default_block_len, 1, 2**31 - 1)
        check_parameter.integer("pool_kernel", self.pool_kernel, 1, MAX_POOL_KERNEL)
        if self.pool_kernel % 2 == 0:
            raise InvalidParameter(f"pool_kernel is {self.pool_kernel}; give an odd number", field="pool_kernel")
        check_parameter.flag("head_select", self.head_select)


@dataclass(frozen=True, slots=True)
class DiffusionParams:
    """How a diffusion model fills its canvas of masked tokens; SamplingParams.diffusion.

    None for block_length, cache or canvas means: 32, "dual" and "fixed" for full-attention models;
    the model's own block, "block" and "grow" for block diffusion. None for a field of a policy means the value in
    POLICY_FIELDS; a field that the policy does not read is refused.
    """

    steps: int | None = None  # over the whole canvas; None: one token per step, the threshold policies more
    block_length: int | None = None  # blocks are denoised from left to right
    sub_block_length: int | None = None  # the parts of a block that are filled one after the other; None: all at once
    policy: Policy = "low_confidence"  # which positions are filled in a step
    threshold: float | None = None  # threshold, local_leap, hierarchy, joint_threshold: fill from this confidence on
    factor: float | None = None  # factor: fill the largest n with confidence >= 1 - factor / (n + 1)
    entropy_threshold: float | None = None  # entropy_exit: fill below so many nats
    relaxed_threshold: float | None = None  # local_leap: enough within radius of a position that reaches threshold
    radius: int | None = None
    low_threshold: float | None = None  # hierarchy: enough for the best position of a run of masked ones
    edit_threshold: float | None = None  # joint_threshold: above it another token replaces a filled one of the block
    max_post_edit_steps: int | None = None  # joint_threshold: passes that only edit, once a block is filled
    cache: Cache | None = None
    canvas: CanvasKind | None = None  # fixed: max_tokens rounded up to whole blocks; grow: block by block
    sparse: SparseConfig | None = None
    cfg_scale: float = 0.0  # classifier-free guidance away from the answer to no prompt; 0: off
    alg_temp: float = 0.0  # > 0: positions are drawn from softmax(confidence / alg_temp); for policies with a count
    pinned: Mapping[int, int | str] = field(default_factory=dict)  # index in the answer -> what is fixed from there on
    events: bool = False  # send the canvas after each step: TokenEvent.canvas

    def __post_init__(self) -> None:
        check_parameter.integer("steps", self.steps, 1, 2**31 - 1, optional=True)
        check_parameter.integer("block_length", self.block_length, 1, 2**31 - 1, optional=True)
        check_parameter.integer("sub_block_length", self.sub_block_length, 1, 2**31 - 1, optional=True)
        check_parameter.one_of("policy", self.policy, POLICIES)
        for name in ("threshold", "relaxed_threshold", "low_threshold", "edit_threshold"):
            check_parameter.number(name, getattr(self, name), 0.0, 1.0, optional=True)
        check_parameter.number("factor", self.factor, 0.0, 1e6, optional=True)
        check_parameter.number("entropy_threshold", self.entropy_threshold, 0.0, 100.0, optional=True)
        check_parameter.integer("radius", self.radius, 1, 2**31 - 1, optional=True)
        check_parameter.integer("max_post_edit_steps", self.max_post_edit_steps, 0, MAX_POST_EDIT_STEPS, optional=True)
        check_parameter.one_of("cache", self.cache, CACHES, optional=True)
        check_parameter.one_of("canvas", self.canvas, CANVASES, optional=True)
        check_parameter.number("cfg_scale", self.cfg_scale, 0.0, 100.0)
        check_parameter.number("alg_temp", self.alg_temp, 0.0, 100.0)
        check_parameter.flag("events", self.events)
        self._refuse_unread()
        self._check_sparse()
        object.__setattr__(self, "pinned", _pinned(self.pinned))

    @property
    def pinned_ids(self) -> Mapping[int, int]:
        """The pinned tokens, once texts among them were encoded (kvarn.fill.pins)."""
        return {index: token_id for index, token_id in self.pinned.items() if isinstance(token_id, int)}

    def _refuse_unread(self) -> None:
        """Refuse fields of other policies: they would be ignored."""
        read = POLICY_FIELDS.get(self.policy, {})
        for name in sorted({name for fields in POLICY_FIELDS.values() for name in fields} - read.keys()):
            if getattr(self, name) is not None and not (name == "alg_temp" and self.alg_temp == 0):
                users = [policy for policy, fields in POLICY_FIELDS.items() if name in fields]
                raise InvalidParameter(
                    f"{name} has no meaning for policy {self.policy!r}; leave it out, or use {' or '.join(users)}",
                    field=name,
                )

    def _check_sparse(self) -> None:
        if self.sparse is None:
            return
        if not isinstance(self.sparse, SparseConfig):
            raise InvalidParameter(f"sparse is {short(self.sparse)}; give a kvarn.SparseConfig", field="sparse")
        if self.sparse.enabled and self.cache not in (None, "sparse"):
            raise InvalidParameter(
                f"sparse is given with cache={self.cache!r}; use cache='sparse', or leave one out", field="sparse"
            )
        if not self.sparse.enabled and self.cache == "sparse":
            raise InvalidParameter(
                "cache is 'sparse' and sparse is not enabled; use another cache, or enable it", field="cache"
            )


@dataclass(frozen=True, slots=True)
class CanvasView:
    """An answer while it is denoised: token_ids has None where a position is still masked."""

    token_ids: tuple[int | None, ...]  # of the answer, from its first token to the end of the canvas
    block_start: int  # the block being denoised, as indices into token_ids
    block_end: int
    step: int  # forward passes of this request so far, from 1


def _pinned(pinned: object) -> Mapping[int, int | str]:
    if not isinstance(pinned, Mapping):
        raise InvalidParameter(
            f"pinned is {short(pinned)}; give a mapping of index in the answer to token id, or to a text",
            field="pinned",
        )
    for index, given in pinned.items():
        check_parameter.integer("an index of pinned", index, 0, 2**31 - 1)
        if not isinstance(given, str):
            check_parameter.integer(f"the token at index {index} of pinned", given, 0, 2**31 - 1)
        elif not given:
            raise InvalidParameter(f"the text at index {index} of pinned is empty; leave it out", field="pinned")
    return dict(pinned)
