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
            found.append(
                f"{self.by} looks at no activations: KL {self.kl_unrounded:.3f} on the text, the same shape by "
                f"influence gives {self.influence_kl:.3f}; use influence (--by influence)"
            )
        if self.encoded_again:
            found.append(
                f"{len(self.encoded_again)} matrices, {self.encoded_again[0]} the first, were quantised already and "
                "are rounded a second time; start from F16, BF16 or F32 where there is one"
            )
        if self.healing is not None and self.kl is not None and self.kl >= (self.kl_unrounded or 0.0):
            found.append(
                f"healing did not help: KL {self.kl_unrounded:.3f} before it, {self.kl:.3f} of the file on the text; "
                "heal longer, on a GPU, or not at all"
            )
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        more = {"kept": self.kept, "removed_layers": self.removed_layers, "warnings": self.warnings}
        return {**asdict(self), **more}
