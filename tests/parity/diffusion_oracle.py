"""The published denoising loops in plain NumPy: the whole canvas is computed anew in every step, nothing is cached.

Written from the papers' descriptions, not from Kvarn's decoder: LLaDA (arXiv 2502.09992, with guidance), Dream (arXiv
2508.15487), Fast-dLLM (arXiv 2505.22618) and the policies that grew from them. Equal confidences go to the lower
position, equal logits to the lower id, and the mask token is never an answer. Random policies get their lots from the
caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Logits = Callable[[list[int]], npt.NDArray[np.float32]]  # all rows of a canvas, not shifted
Lots = Callable[[int, int], float]  # position, step of the block -> [0, 1)

LLADA_POLICIES = ("low_confidence", "random")
DREAM_POLICIES = ("origin", "maskgit_plus", "topk_margin", "entropy")
PARALLEL_POLICIES = ("threshold", "factor", "entropy_exit", "local_leap", "hierarchy", "joint_threshold")


@dataclass(frozen=True)
class Job:
    """What is asked of a loop. steps: of every block; the parallel policies do without unless told."""

    num_tokens: int
    block: int
    policy: str
    mask_id: int
    steps: int | None = None
    shift: bool = False
    cfg_scale: float = 0.0
    threshold: float = 0.9
    factor: float = 1.0
    entropy_threshold: float = 1.5
    relaxed: float = 0.75
    radius: int = 4
    low: float = 0.4
    edit: float = 0.0
    edit_steps: int = 16
    lots: Lots = lambda position, step: 0.0


@dataclass
class Canvas:
    """Tokens, which of them are masked, and how often the model was asked."""

    tokens: list[int]
    masked: list[bool]
    num_prompt: int
    num_passes: int = 0

    def masked_in(self, start: int, end: int) -> list[int]:
        return [p for p in range(start, end) if self.masked[p]]


@dataclass(frozen=True)
class Seen:
    """What the model says about one position."""

    token: int
    confidence: float
    margin: float
    entropy: float


def generate(logits: Logits, prompt: Sequence[int], job: Job) -> Canvas:
    """Fill job.num_tokens after the prompt, block by block from the left."""
    masked = [False] * len(prompt) + [True] * job.num_tokens
    canvas = Canvas([*prompt, *[job.mask_id] * job.num_tokens], masked, len(prompt))
    for start in range(len(prompt), len(canvas.tokens), job.block):
        end = min(start + job.block, len(canvas.tokens))
        if job.policy in LLADA_POLICIES:
            llada_block(logits, canvas, start, end, job)
        elif job.policy in DREAM_POLICIES:
            dream_block(logits, canvas, start, end, job)
        else:
            parallel_block(logits, canvas, start, end, job)
    return canvas


def llada_block(logits: Logits, canvas: Canvas, start: int, end: int, job: Job) -> None:
    """Every step fills its even share of the block, the surest positions first."""
    steps = job.steps or end - start
    shares = even_shares(end - start, steps)
    for step, share in enumerate(shares):
        if share == 0:
            continue
        seen = look(logits, canvas, start, end, job)
        if job.policy == "random":
            worth = {p: job.lots(p, step) for p in seen}
        else:
            worth = {p: one.confidence for p, one in seen.items()}
        fill(canvas, best(worth, share), seen)


def even_shares(num_masked: int, steps: int) -> list[int]:
    """floor or ceil of the mean, the larger shares first."""
    return [num_masked // steps + (1 if step < num_masked % steps else 0) for step in range(steps)]


def dream_block(logits: Logits, canvas: Canvas, start: int, end: int, job: Job) -> None:
    """Time runs from 1 to 0.001; a step fills the share of the masked positions that its stride of time stands for."""
    steps = job.steps or end - start
    for step in range(steps):
        left = canvas.masked_in(start, end)
        if job.policy == "origin":
            share = dream_share(steps, step)
            chosen = [p for p in left if job.lots(p, step) < share]
            if chosen:
                fill(canvas, chosen, look(logits, canvas, start, end, job))
        elif count := dream_count(len(left), steps, step):
            seen = look(logits, canvas, start, end, job)
            worths = {
                "maskgit_plus": {p: one.confidence for p, one in seen.items()},
                "topk_margin": {p: one.margin for p, one in seen.items()},
                "entropy": {p: -one.entropy for p, one in seen.items()},
            }
            fill(canvas, best(worths[job.policy], count), seen)


def dream_share(steps: int, step: int) -> float:
    times = np.linspace(1.0, 1e-3, steps + 1)
    return 1.0 if step == steps - 1 else float(1 - times[step + 1] / times[step])


def dream_count(num_masked: int, steps: int, step: int) -> int:
    return int(num_masked * dream_share(steps, step))


def parallel_block(logits: Logits, canvas: Canvas, start: int, end: int, job: Job) -> None:
    """No schedule, or one that gives a least count; at least one position in every step."""
    shares = even_shares(end - start, job.steps) if job.steps else []
    step = 0
    edits_left = job.edit_steps if job.policy == "joint_threshold" else 0
    while (left := canvas.masked_in(start, end)) or edits_left:
        edits_left -= not left  # a pass over a full block, which can only edit
        seen = look(logits, canvas, start, end, job, with_filled=job.policy == "joint_threshold")
        open_ = {p: seen[p] for p in left}
        least = max(1 if left else 0, shares[step] if step < len(shares) else 0)
        chosen = CHOICES[job.policy](open_, job)
        worth = {p: -one.entropy if job.policy == "entropy_exit" else one.confidence for p, one in open_.items()}
        chosen |= set(best(worth, min(least, len(left))))
        for p, one in seen.items():  # joint_threshold: what was filled may change
            if p not in open_ and one.token != canvas.tokens[p] and one.confidence > job.edit:
                chosen.add(p)
        if not chosen:
            break
        fill(canvas, sorted(chosen), seen)
        step += 1


def by_threshold(seen: dict[int, Seen], job: Job) -> set[int]:
    return {p for p, one in seen.items() if one.confidence >= job.threshold}


def by_factor(seen: dict[int, Seen], job: Job) -> set[int]:
    """The longest run of the surest whose n-th reaches 1 - f / (n + 1)."""
    order = best({p: one.confidence for p, one in seen.items()}, len(seen))
    chosen: set[int] = set()
    for n, p in enumerate(order, 1):
        if seen[p].confidence < 1 - job.factor / (n + 1):
            break
        chosen.add(p)
    return chosen


def by_entropy(seen: dict[int, Seen], job: Job) -> set[int]:
    return {p for p, one in seen.items() if one.entropy < job.entropy_threshold}


def by_leap(seen: dict[int, Seen], job: Job) -> set[int]:
    """Anchors, and their neighbours that are nearly as sure."""
    anchors = by_threshold(seen, job)
    chosen = set(anchors)
    for anchor in anchors:
        for p in range(anchor - job.radius, anchor + job.radius + 1):
            if p in seen and seen[p].confidence >= job.relaxed:
                chosen.add(p)
    return chosen


def by_hierarchy(seen: dict[int, Seen], job: Job) -> set[int]:
    """All that are sure, and the best of every unbroken run of masked positions if it is not too bad."""
    chosen = {p for p, one in seen.items() if one.confidence > job.threshold}
    run: dict[int, float] = {}
    for p in [*sorted(seen), -1]:
        if run and p - 1 not in run:
            (top,) = best(run, 1)
            chosen |= {top} if run[top] > job.low else set()
            run = {}
        if p >= 0:
            run[p] = seen[p].confidence
    return chosen


CHOICES: dict[str, Callable[[dict[int, Seen], Job], set[int]]] = {
    "threshold": by_threshold,
    "joint_threshold": by_threshold,
    "factor": by_factor,
    "entropy_exit": by_entropy,
    "local_leap": by_leap,
    "hierarchy": by_hierarchy,
}


def look(
    logits: Logits, canvas: Canvas, start: int, end: int, job: Job, *, with_filled: bool = False
) -> dict[int, Seen]:
    """Ask the model about the masked positions of a block (or about all of it)."""
    rows = logits(canvas.tokens).astype(np.float64)
    if job.cfg_scale > 0:
        without = [job.mask_id] * canvas.num_prompt + canvas.tokens[canvas.num_prompt :]
        blind = logits(without).astype(np.float64)
        rows = blind + (job.cfg_scale + 1) * (rows - blind)
    if job.shift:
        rows = np.concatenate([rows[:1], rows[:-1]])
    canvas.num_passes += 1
    wanted = range(start, end) if with_filled else canvas.masked_in(start, end)
    return {p: _seen(rows[p], job.mask_id) for p in wanted}


def _seen(row: Array, mask_id: int) -> Seen:
    p = np.exp(row - row.max())
    p /= p.sum()
    first, second = np.sort(p)[::-1][:2]
    allowed = np.where(np.arange(len(row)) == mask_id, -np.inf, row)
    token = int(np.argmax(allowed))
    return Seen(token, float(p[token]), float(first - second), float(-(p * np.log(p + 1e-300)).sum()))


def best(worth: dict[int, float], count: int) -> list[int]:
    """The count largest, the lower position first among equals."""
    return sorted(worth, key=lambda p: (-worth[p], p))[:count]


def fill(canvas: Canvas, positions: Sequence[int], seen: dict[int, Seen]) -> None:
    for p in positions:
        canvas.tokens[p] = seen[p].token
        canvas.masked[p] = False
