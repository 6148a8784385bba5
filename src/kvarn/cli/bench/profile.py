"""`kvarn bench model --profile`: where the time goes, as a table, a line of JSON and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarn.bench.model import ModelBench
    from kvarn.bench.profile import Profile
    from kvarn.config import EngineConfig


def print_profile(path: Path, bench: ModelBench, config: EngineConfig, plot: Path | None, only_json: bool) -> None:
    """Measure the rows with timed kernels and print where their time went."""
    from kvarn.bench.profile import profile
    from kvarn.bench.profile_plot import svg

    found = profile(path, bench.rows, bench.steps, bench.rounds, config)
    if plot is not None:
        plot.write_text(svg(found), encoding="utf-8")
    if not only_json:
        _print_table(found)
    print(json.dumps(_report(found)))


def _print_table(found: Profile) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{found.model}: shares of the time of {found.threads} threads, kernels {found.isa}"
    table = Table("", title=title, title_justify="left", box=None, pad_edge=False)
    for row in found.rows:
        table.add_column(row.name, justify="right")
    regions = dict.fromkeys(region for row in found.rows.values() for region in row.shares)
    for region in regions:
        shares = [row.shares.get(region, 0.0) for row in found.rows.values()]
        table.add_row(region, *(f"{share:.1%}" for share in shares))
    Console().print(table)


def _report(found: Profile) -> dict[str, Any]:
    from kvarn.bench.report import describe_machine

    rows = {
        row.name: {
            "shares": {region: round(share, 4) for region, share in one.shares.items()},
            "tokens_per_s": round(one.num_tokens / one.seconds, 2),
        }
        for row, one in found.rows.items()
    }
    head = {"bench": "profile", "model": found.model, "isa": found.isa, "threads": found.threads}
    return head | {"machine": describe_machine(), "rows": rows}
