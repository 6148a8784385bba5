"""`kvarn bench model` and `kvarn bench make`: speed of one model, and models of standard shapes to measure it with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvarn.cli.terminal.options import BackendName, Model, Threads
from kvarn.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.table import Table

    from kvarn.bench.model import ModelBench
    from kvarn.config import EngineConfig

RowNames = Annotated[list[str] | None, typer.Option("--row", "-r", help="Measure this row only; repeat for more.")]


def bench_model(
    *,
    model: Model = DEFAULT_MODEL,
    row: RowNames = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000, help="Measurements of each row.")] = 5,
    steps: Annotated[int, typer.Option("--steps", min=1, max=10_000, help="Decode steps of one measurement.")] = 32,
    threads: Threads = None,
    backend: BackendName = None,
    kv_dtype: Annotated[
        str | None, typer.Option("--kv-dtype", help="f16, f32 or q8_0; on a GPU also bf16, its default, and fp8.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Where the time goes instead: kernels, other code, waiting.")
    ] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the profile as an SVG too.")] = None,
    only_json: Annotated[bool, typer.Option("--json", help="Print the line of JSON only.")] = False,
) -> None:
    """Prefill, decode and batched decode in tokens per second, beside what this machine could do at most."""
    from kvarn.bench.model import ModelBench
    from kvarn.bench.rows import select_rows
    from kvarn.cli.bench.profile import print_profile
    from kvarn.cli.terminal.progress import progress_bar
    from kvarn.config import EngineConfig, is_offline
    from kvarn.hub import resolve

    bench = ModelBench(select_rows(row or ()), rounds, steps)
    config = EngineConfig(threads=threads, kv_dtype=kv_dtype, backend=backend or "auto")
    with progress_bar() as draw:
        path = resolve(model, offline=is_offline(), on_progress=draw)
    if profile or plot is not None:
        print_profile(path, bench, config, plot, only_json)
    else:
        _print_speeds(path, bench, config, only_json)


def _print_speeds(path: Path, bench: ModelBench, config: EngineConfig, only_json: bool) -> None:
    from kvarn.bench.model import measure
    from kvarn.bench.report import report

    figures = report(measure(path, bench, config, _print_round if sys.stderr.isatty() else None))
    if not only_json:
        from rich.console import Console

        console = Console()
        console.print(_table(figures))
        console.print(_footer(figures), markup=False, highlight=False)
    print(json.dumps(figures))


def bench_make(
    shape: Annotated[
        str,
        typer.Argument(
            help="smollm2-135m, qwen2.5-0.5b, qwen2.5-1.5b, llama-3.2-1b, llama-3.1-8b, llada-small or llada-8b."
        ),
    ],
    type: Annotated[str, typer.Argument(metavar="TYPE", help="Q4_0, Q8_0, Q4_K, ... or the mixes Q4_K_M, Q5_K_M.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="[default: SHAPE-TYPE.gguf]")] = None,
) -> None:
    """Write a model of a standard shape with random weights: as fast as the real one, and as big."""
    from kvarn.bench.synthetic import write_model
    from kvarn.cli.terminal.progress import progress_bar

    path = output or Path(f"{shape}-{type}.gguf")
    with progress_bar() as draw:
        write_model(path, shape, type, lambda done, total: draw(done, total, path.name))
    print(f"{path}  {path.stat().st_size / 1e6:,.1f} MB")


def _print_round(done: int, total: int) -> None:
    print(f"\rround {done} of {total}", end="" if done < total else "\n", file=sys.stderr, flush=True)


def _table(figures: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table("row", title=figures["model"], title_justify="left", box=None, pad_edge=False)
    for heading in ("tokens/s", "spread", "ceiling", "of ceiling"):
        table.add_column(heading, justify="right")
    table.add_column("bound by")
    for name, row in figures["rows"].items():
        cells = [name, f"{row['tokens_per_s']:,.1f}", f"{row['spread']:.1%}"]
        if "ceiling" in row:
            cells += [f"{row['ceiling']:,.0f}", f"{row['of_ceiling']:.1%}", row["bound"]]
        table.add_row(*cells)
    return table


def _footer(figures: dict[str, Any]) -> str:
    machine, limits = figures["machine"], figures["limits"]
    text = f"{machine['processor']}, {figures['threads']} threads, kernels {figures['isa'] or 'reference'}"
    if limits:
        text += f"; measured limits: read {limits['read_gbps']} GB/s, products {limits['dot_gops']} GOP/s"
    return f"{text}; load {', '.join(map(str, machine['load']))}"
