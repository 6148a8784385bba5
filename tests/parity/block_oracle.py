"""The published loops of block diffusion in plain NumPy: everything is computed anew in every step, nothing is cached.

Written from LLaDA2MoeModelLM.generate of LLaDA 2.0 and 2.1 (arXiv 2512.15745, 2602.08676) and batch_sample of Fast-dLLM
v2 (arXiv 2509.26328), for one prompt at temperature 0. They fill above a threshold; here as in Kvarn a
confidence that equals it suffices, and the mask token is never an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.parity.diffusion_oracle import Canvas, Job, Logits, Seen, best, fill, look


@dataclass(frozen=True)
class BlockJob:
    """What is asked of a loop. edit: None where nothing is edited. sub_block: None where a block has no parts."""

    num_tokens: int
    block: int
    mask_id: int
    threshold: float
    edit: float | None = None
    max_post_steps: int = 16
    sub_block: int | None = None


def llada2(logits: Logits, prompt: list[int], job: BlockJob) -> Canvas:
    """Blocks are counted from position 0; the first one to fill may hold the end of the prompt."""
    canvas = _canvas(prompt, job)
    for start in range(len(prompt) // job.block * job.block, len(canvas.tokens), job.block):
        _llada2_block(logits, canvas, start, job)
    return canvas


def _llada2_block(logits: Logits, canvas: Canvas, start: int, job: BlockJob) -> None:
    end, post_steps = start + job.block, 0
    while True:
        active = canvas.masked_in(start, end)
        if not active:
            post_steps += 1
        if post_steps > (job.max_post_steps if job.edit is not None else 0):
            return
        seen = _look(logits, canvas, start, end, job, shift=False)
        chosen = _sure_or_best({p: seen[p] for p in active}, job.threshold)
        edits = [
            p for p in seen if p not in active and p >= canvas.num_prompt and _is_edit(seen[p], canvas.tokens[p], job)
        ]
        fill(canvas, sorted([*chosen, *edits]), seen)
        if not active and not edits:
            return


def fast_dllm_v2(logits: Logits, prompt: list[int], job: BlockJob) -> Canvas:
    """A block's first token follows from the row before it; the others are filled part by part."""
    canvas, part = _canvas(prompt, job), job.sub_block or job.block
    for start in range(len(prompt) // job.block * job.block, len(canvas.tokens), job.block):
        if canvas.masked[start]:
            fill(canvas, [start], _look(logits, canvas, start, start + 1, job, shift=True))
        for first in range(start, start + job.block, part):
            while active := canvas.masked_in(first, first + part):
                seen = _look(logits, canvas, start, start + job.block, job, shift=True)
                fill(canvas, sorted(_sure_or_best({p: seen[p] for p in active}, job.threshold)), seen)
    return canvas


def _canvas(prompt: list[int], job: BlockJob) -> Canvas:
    length = -(-(len(prompt) + job.num_tokens) // job.block) * job.block
    num_masked = length - len(prompt)
    masked = [False] * len(prompt) + [True] * num_masked
    return Canvas([*prompt, *[job.mask_id] * num_masked], masked, len(prompt))


def _look(logits: Logits, canvas: Canvas, start: int, end: int, job: BlockJob, *, shift: bool) -> dict[int, Seen]:
    """The model sees the text up to the end of the block, and nothing behind it."""
    visible = Canvas(canvas.tokens[:end], canvas.masked[:end], canvas.num_prompt)
    asked = Job(job.num_tokens, job.block, "threshold", job.mask_id, shift=shift)
    canvas.num_passes += 1
    return look(logits, visible, start, end, asked, with_filled=True)


def _sure_or_best(active: dict[int, Seen], threshold: float) -> set[int]:
    sure = {p for p, one in active.items() if one.confidence >= threshold}
    return sure or set(best({p: one.confidence for p, one in active.items()}, 1))


def _is_edit(seen: Seen, token: int, job: BlockJob) -> bool:
    return job.edit is not None and seen.token != token and seen.confidence > job.edit
