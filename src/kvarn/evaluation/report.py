"""What an evaluation found: frozen figures, as a table for people and as plain data for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvarn.evaluation.divergence import Float64


@dataclass(frozen=True, slots=True)
class Divergence:
    """Distance from a source over the scored tokens: KL(source || model) in nats."""

    source: str
    kl_mean: float
    kl_mean_error: float  # standard error of the mean
    kl_median: float
    kl_99: float
    kl_999: float
    kl_max: float
    top1: float  # share of tokens where both think the same one the most probable


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """One model on one text. Perplexity and KL are over the second half of each chunk, as in llama-perplexity."""

    model: str
    num_bytes: int
    num_weights: int
    bits_per_weight: float
    text: tuple[str, ...]
    num_chunks: int
    context: int
    num_scored: int
    perplexity: float
    perplexity_error: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    divergence: Divergence | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def perplexity_of(losses: Float64) -> tuple[float, float]:
    """exp(mean loss) and its standard error."""
    mean = math.exp(losses.mean())
    error = mean * float(losses.std(ddof=1)) / math.sqrt(len(losses)) if len(losses) > 1 else math.inf
    return mean, error


def divergence_of(source: str, kl: Float64, agrees: np.ndarray[Any, np.dtype[np.bool_]]) -> Divergence:
    """Summarise the divergences of single tokens."""
    median, high, highest = np.quantile(kl, (0.5, 0.99, 0.999))
    error = float(kl.std(ddof=1)) / math.sqrt(len(kl)) if len(kl) > 1 else math.inf
    return Divergence(
        source=source,
        kl_mean=float(kl.mean()),
        kl_mean_error=error,
        kl_median=float(median),
        kl_99=float(high),
        kl_999=float(highest),
        kl_max=float(kl.max()),
        top1=float(agrees.mean()),
    )


def table_of(reports: Sequence[EvaluationReport]) -> list[tuple[str, ...]]:
    """Cells of a table: a heading and one row for each model."""
    has_source = any(report.divergence is not None for report in reports)
    heading = ("model", "MB", "bits/weight", "perplexity", "prefill tok/s", "decode tok/s")
    more = ("KL mean", "median", "99%", "99.9%", "top-1") if has_source else ()
    return [heading + more, *(_row(report, has_source=has_source) for report in reports)]


def _row(report: EvaluationReport, *, has_source: bool) -> tuple[str, ...]:
    cells = (
        report.model,
        f"{report.num_bytes / 1e6:,.1f}",
        f"{report.bits_per_weight:.3f}",
        f"{report.perplexity:.4f} ± {report.perplexity_error:.4f}",
        f"{report.prefill_tokens_per_s:,.0f}",
        f"{report.decode_tokens_per_s:,.1f}",
    )
    if not has_source:
        return cells
    found = report.divergence
    if found is None:
        return (*cells, "source", "", "", "", "")
    figures = (f"{value:.5f}" for value in (found.kl_median, found.kl_99, found.kl_999))
    return (*cells, f"{found.kl_mean:.5f} ± {found.kl_mean_error:.5f}", *figures, f"{found.top1:.2%}")
