"""What to remove, and how: checked before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.checks import check_parameter
from kvarn.config import MAX_THREADS
from kvarn.errors import ConfigError
from kvarn.evaluation.text import TextFiles, text_paths
from kvarn.pruning.importance.criteria import CRITERIA
from kvarn.pruning.importance.scores import SEED
from kvarn.quantization.allocation.allocate import SizeTarget
from kvarn.quantization.fp8.scheme import FP8Scheme
from kvarn.quantization.recipes import mix_name

MAX_LAYERS = 10_000
MAX_MINUTES = 10_000.0


@dataclass(frozen=True, slots=True)
class PruneTarget:
    """A budget: keep, the share of the weights of all layers, or num_bytes of the file; the split is measured.

    Or parts to remove: a number of layers, a ratio of the feed-forward's channels, a ratio of the heads.
    """

    keep: float | None = None
    num_bytes: int | None = None
    layers: int | None = None
    ffn: float | None = None
    heads: float | None = None

    def __post_init__(self) -> None:
        check_parameter.number("keep", self.keep, 0.0, 1.0, optional=True)
        check_parameter.integer("bytes", self.num_bytes, 1, 1 << 60, optional=True)
        check_parameter.integer("layers", self.layers, 0, MAX_LAYERS, optional=True)
        check_parameter.number("ffn", self.ffn, 0.0, 1.0, optional=True)
        check_parameter.number("heads", self.heads, 0.0, 1.0, optional=True)
        parts = [name for name in ("layers", "ffn", "heads") if getattr(self, name) is not None]
        budgets = [name for name in ("keep", "num_bytes") if getattr(self, name) is not None]
        if len(budgets) + bool(parts) != 1:
            given = ", ".join(budgets + parts) or "nothing"
            raise ConfigError(f"{given} given; give one budget (keep, bytes), or parts to remove (layers, ffn, heads)")

    @property
    def is_budget(self) -> bool:
        return self.keep is not None or self.num_bytes is not None

    @property
    def removes_nothing(self) -> bool:
        return self.keep == 1 or not (self.is_budget or self.layers or self.ffn or self.heads)


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """by: what is thought to matter. text: to measure on, never the one to judge the result by.

    refit: fit what stays to what went. then: quantise the result. heal_minutes: distil from the source, with torch;
    heal_steps: exactly so many steps instead, which the same seed repeats. seed: also of random choices.
    """

    text: TextFiles = ()
    by: str = "influence"
    refit: bool = True
    then: str | SizeTarget | None = None
    heal_minutes: float | None = None
    heal_steps: int | None = None
    requantize: bool = False
    force: bool = False
    threads: int | None = None
    seed: int = SEED

    def __post_init__(self) -> None:
        check_parameter.one_of("by", self.by, CRITERIA)
        check_parameter.integer("threads", self.threads, 1, MAX_THREADS, optional=True)
        check_parameter.number("heal", self.heal_minutes, 0.0, MAX_MINUTES, optional=True)
        check_parameter.integer("heal_steps", self.heal_steps, 0, 1 << 30, optional=True)
        check_parameter.integer("seed", self.seed, 0, (1 << 31) - 1)
        for name in ("refit", "requantize", "force"):
            check_parameter.flag(name, getattr(self, name))
        text_paths(self.text)
        if not isinstance(self.then, SizeTarget | None) and mix_name(self.then) in FP8Scheme.__members__:
            raise ConfigError(f"then is {self.then}: a pruned model is a GGUF file, which has no FP8; give a GGUF type")

    @property
    def heals(self) -> bool:
        return bool(self.heal_minutes or self.heal_steps)

    @property
    def has_text(self) -> bool:
        return len(text_paths(self.text)) > 0

    def check_for(self, target: PruneTarget) -> None:
        """Refuse what does not go together with a target."""
        if target.removes_nothing and (self.then is not None or self.heals):
            raise ConfigError("nothing is to be removed; quantise with `kvarn quantize`, or remove something")
        if not target.removes_nothing and not self.has_text:
            raise ConfigError("what may go is measured on a text; give one (--text FILE)")
