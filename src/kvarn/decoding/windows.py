"""Which positions a denoising step computes and which it attends to, by the kind of cache: pure arithmetic.

    full      |xxxxxxxxxxxxxxxxxxxxxxx|    none; others in the first step of a block (sparse: until delay_step)
    prefix    |........xxxxxxxxxxxxxxx|    block and everything right of it
    dual      |........xxxxxx.........|    the block alone, against all others as they were in the full step
    sparse    |. . ....xxxxxx. ..  . .|    the block alone, against the kept ones among the others
    block     |........xxxxxx|             nothing is right of it; what is left of it never changes
    sub_block |..........xx...  .  .  .|   a part of the block, against the others as they were in its first step

x is computed, . is read from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.decoding.canvas import CanvasBlock
from kvarn.decoding.denoise_config import DenoiseConfig


@dataclass(frozen=True, slots=True)
class Window:
    """Positions start .. end are computed against num_slots slots."""

    start: int
    end: int
    num_slots: int
    slot_shift: int = 0
    reads_kept: bool = False
    num_kept: int = 0  # to be chosen in this step; 0: none

    @property
    def num_rows(self) -> int:
        return self.end - self.start


def full_attention_window(
    config: DenoiseConfig,
    block: CanvasBlock,
    num_passes: int,
    length: int,
    shift: int,
    *,
    active_part: CanvasBlock | None = None,
) -> Window:
    """The next step of a model with full attention.

    num_passes: steps this block has had. length: of the canvas now. shift: rows before a position that its logits come
    from; the active part begins there. active_part: of the block, where the others are read from the cache.
    """
    start, cache = block.start - shift, config.cache
    if cache == "sparse":
        return _sparse_window(config, CanvasBlock(block.index, start, block.end), num_passes, length)
    if num_passes == 0 or cache == "none":
        return Window(0, length, length)
    if active_part is not None:
        return Window(active_part.start - shift, active_part.end, length)
    return Window(start, length if cache == "prefix" else block.end, length)


def block_window(
    block: CanvasBlock,
    num_computed: int,
    *,
    is_first_alone: bool,
    shift: int = 0,
    active_part: CanvasBlock | None = None,
) -> Window:
    """The next step of a block-diffusion model: known text that is not computed, and the block.

    is_first_alone: the step fills the first position, from the row before it.
    """
    if is_first_alone:
        return Window(min(num_computed, block.start - 1), block.start, block.start)
    if active_part is not None:
        return Window(max(block.start, active_part.start - shift), active_part.end, block.end)
    return Window(min(num_computed, block.start), block.end, block.end)


def sequence_lengths(config: DenoiseConfig, length: int, shift: int) -> tuple[int, ...]:
    """Slots of each sequence of the KV cache that a canvas of this length needs."""
    lengths: tuple[int, ...] = (length,)
    if config.cache == "sparse":
        num_active = min(config.block_length + shift, length)
        lengths = (length, _num_kept(config, length - num_active) + num_active)
    return lengths * 2 if config.is_guided else lengths


def _num_kept(config: DenoiseConfig, num_outside: int) -> int:
    """How many of the tokens outside a block are kept."""
    return max(1, int(config.sparse.retention_ratio * num_outside)) if num_outside else 0


def _sparse_window(config: DenoiseConfig, active: CanvasBlock, num_passes: int, length: int) -> Window:
    num_active = active.end - active.start
    kept = _num_kept(config, length - num_active)
    delay = config.sparse.delay_step
    if num_passes <= delay:
        return Window(0, length, length, num_kept=kept if num_passes == delay else 0)
    return Window(active.start, active.end, kept + num_active, active.start - kept, reads_kept=True)
