"""`kvarn batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvarn.cli.serving.serve import Models
from kvarn.cli.terminal.options import Config, EngineOptions

OnProgress = Callable[[int, int], None]
Workers = Annotated[
    int, typer.Option(min=1, max=512, help="Processes with an engine each: a share of the cores, or one GPU.")
]


def batch(
    requests: Annotated[Path, typer.Argument(metavar="IN.jsonl", readable=False, help="Requests, one to a line.")],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Answers; what it has is not asked again.")
    ],
    model: Models = None,
    config: Config = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, max=65536, help="Requests on their way at once, to each worker. [default: 2 x engine.max_running]"
        ),
    ] = None,
    workers: Workers = 1,
    engine: EngineOptions,
) -> None:
    """Answer a file of requests in OpenAI's batch format, as fast as the engine can.

    A line has custom_id, method (POST), url (/v1/chat/completions, /v1/completions, /v1/embeddings, /v1/responses) and
    body; a server gives the same answer to the same body. Run it again after whatever ended it: each line is answered
    once. A line that is broken is told in OUT.jsonl with its number, the others run. Exit code 1: some lines failed.
    """
    from kvarn.observe.logs import configure_logging
    from kvarn.server.process.setting_sources import load_config

    values = {"models": tuple(model) if model else None}
    values |= {f"engine.{name}": value for name, value in asdict(engine).items()}
    settings = load_config(config, {name: value for name, value in values.items() if value is not None})
    configure_logging("error")
    from kvarn.server.batches.offline import Processes, run_offline

    with _progress() as draw:
        done = run_offline(settings, requests, output, Processes(workers, concurrency), draw)
    before = f", {done.num_before:,} of them before" if done.num_before else ""
    print(f"{done.num_lines:,} lines answered{before}; {done.num_failed:,} failed; {output}", file=sys.stderr)
    if done.num_failed:
        raise typer.Exit(1)


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """A bar where stderr is a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
