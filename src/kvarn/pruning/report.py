"""What pruning did: shapes before and after, what was measured on the text, and what a reader should be warned of."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvarn.pruning.heal import HealingReport
from kvarn.pruning.planner import CutTrial
from kvarn.pruning.shapes import CutShape


@dataclass(frozen=True, slots=True)
class CutOutcome:
    """A shape with its weights and bytes, and its perplexity on the text, None where nothing was measured."""

    shape: CutShape
    parameters: int  # of all layers; embedding and head are not counted
    num_bytes: int
    perplexity: float | None = None


@dataclass(frozen=True, slots=True)
class PruningReport:
    """A file that was written. layers: those that stayed, by their numbers in the source.

    kl: mean divergence of the file from the source on the text. trials: shapes that were measured on the way.
    influence_kl: of the same shape by influence, where a criterion was used that looks at no activations.
    budget_bytes: of the file, where that was asked for; channel_step: what the number of channels is a multiple of.
    """

    source: str
    output: str
    by: str
    before: CutOutcome
    after: CutOutcome
    layers: tuple[int, ...]
    seconds: float
    kl: float | None = None
    kl_unrounded: float | None = None
    influence_kl: float | None = None
    trials: tuple[CutTrial, ...] = ()
    encoded_again: tuple[str, ...] = ()  # quantised matrices that were rounded a second time
    healing: HealingReport | None = None
    then: str | None = None  # what the result was quantised to
    budget_bytes: int | None = None
    channel_step: int | None = None

    @property
    def is_rounded(self) -> bool:
        """Whether the file has other errors than those of what went."""
        return self.then is not None or bool(self.encoded_again)

    @property
    def kept(self) -> float:
        """The share of the weights of all layers that stayed."""
        return self.after.parameters / self.before.parameters

    @property
    def removed_layers(self) -> tuple[int, ...]:
        return tuple(number for number in range(self.before.shape.layers) if number not in self.layers)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know before using the file."""
        found = []
        if self.influence_kl is not None and self.kl_unrounded is not None:
            is_worse = self.kl_unrounded > self.influence_kl
            advice = (
                "use influence (--by influence)" if is_worse else "judge both by another text with `kvarn evaluate`"
            )
            found.append(
                f"{self.by} looks at no activations: KL {self.kl_unrounded:.3f} on the text, the same shape by "
                f"influence gives {self.influence_kl:.3f}; {advice}"
            )
        if self.encoded_again:
            found.append(
                f"{len(self.encoded_again)} matrices, {self.encoded_again[0]} the first, were quantised already and "
                "are rounded a second time; start from F16, BF16 or F32 where there is one"
            )
        if self.healing is not None and not self._has_healed:
            before, after = self.healing.losses if self.is_rounded else (self.kl_unrounded, self.kl)
            what = "of its last steps" if self.is_rounded else "of the file on the text"
            found.append(
                f"healing did not help: KL {before:.3f} before it, {after:.3f} {what}; heal longer, on a GPU, or not "
                "at all"
            )
        return tuple(found)

    @property
    def _has_healed(self) -> bool:
        """By the file; where that was rounded, too, by the steps of healing themselves."""
        assert self.healing is not None
        if self.is_rounded:
            return self.healing.losses[1] < self.healing.losses[0]
        return self.kl is not None and self.kl_unrounded is not None and self.kl < self.kl_unrounded

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        more = {"kept": self.kept, "removed_layers": self.removed_layers, "warnings": self.warnings}
        return {**asdict(self), **more}
