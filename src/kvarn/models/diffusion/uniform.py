"""Parts of a ModelSpec: a model that denoises canvases of random tokens, and how its authors let it do that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvarn.models.spec import Activation, Norm


@dataclass(frozen=True, slots=True)
class EntropyBound:
    """The schedule of a canvas: in step i of max_steps, with r = max_steps - i to go, logits are divided by
    t = min_temperature + (max_temperature - min_temperature) * r / max_steps.

    A token is drawn at every position; from the least entropy on, as many are taken as those before them have a sum of
    entropies of at most `bound`, and all others are random again. The canvas is done when its most probable tokens are
    those of the last `stability` steps and the mean entropy is below `confidence`, or after max_steps.
    """

    max_steps: int = 48
    min_temperature: float = 0.4
    max_temperature: float = 0.8
    bound: float = 0.1
    confidence: float = 0.005
    stability: int = 1


@dataclass(frozen=True, slots=True)
class UniformDiffusion:
    """Text is read causally, and behind it a canvas of `canvas` tokens is denoised that began as random ones.

    A row of the canvas reads x / rms(x) with x = e + self_cond_down(act(self_cond_gate(n)) * self_cond_up(n)),
    n = self_cond_pre_norm(s); e: its embedding. s: the mean of all embeddings, weighted as the last step would draw
    their tokens at that position; zeros in the first step of a canvas. Nothing of a canvas stays in the cache.
    """

    canvas: int
    hidden: int
    activation: Activation
    norm: Norm
    schedule: EntropyBound


def canvas_tensors(diffusion: object, width: int) -> dict[str, tuple[int, ...]]:
    """What such a model has beside its layers, with their shapes; others have nothing of it."""
    if not isinstance(diffusion, UniformDiffusion):
        return {}
    wide = (diffusion.hidden, width)
    matrices = {"self_cond_gate.weight": wide, "self_cond_up.weight": wide, "self_cond_down.weight": wide[::-1]}
    return {"self_cond_pre_norm.weight": (width,), **matrices}
