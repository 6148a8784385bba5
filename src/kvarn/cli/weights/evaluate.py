"""`kvarn evaluate`: how good model files are, and how far from their source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvarn.cli.terminal.options import BackendName, Threads
from kvarn.cli.terminal.progress import progress_bar
from kvarn.cli.terminal.text import printable, table_lines
from kvarn.errors import ConfigError

if TYPE_CHECKING:
    from kvarn.evaluation.report import EvaluationReport

Texts = Annotated[list[Path], typer.Option("--text", help="UTF-8 text to measure on; repeat for more files.")]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How much is measured, and with what."""

    chunks: Annotated[int, typer.Option("--chunks", min=0, help="Chunks of the text to use; 0: all.")] = 32
    context: Annotated[int, typer.Option("--context", help="Tokens of a chunk; its second half is scored.")] = 512
    threads: Threads = None
    backend: BackendName = None


def evaluate(
    *,
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Paths or names, as of `kvarn run`.")],
    text: Texts,
    run: RunOptions,
    against: Annotated[
        str | None, typer.Option("--against", help="The source to compare with, token by token.")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also compare the weights, tensor by tensor.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw KL against size into this SVG.")] = None,
    only_json: Annotated[bool, typer.Option("--json", help="Print the line of JSON only.")] = False,
) -> None:
    """Measure perplexity, speed and size of models; with --against also how far each is from its source.

    KL is the divergence of the model's next-token distributions from the source's, in nats: its mean, median and
    tails over the scored tokens. Top-1 is how often both think the same token the most probable. Perplexity and KL
    are of the second half of each chunk, as in llama-perplexity, so the figures can be laid beside its own.

    Example: kvarn evaluate small.gguf smaller.gguf --against source.gguf --text held-out.txt --plot curve.svg
    """
    from kvarn.evaluation.evaluate import EvaluationOptions, evaluate_all
    from kvarn.evaluation.report import table_of

    if against is None and (tensors or plot is not None):
        raise ConfigError("--tensors and --plot compare with a source; name it with --against")
    if plot is not None:
        _require_svg(plot)
    options = EvaluationOptions(run.chunks or None, run.context, run.threads, run.backend or "auto")
    with progress_bar() as show:
        reports = evaluate_all(models, text=text, against=against, options=options, progress=show)
    figures: dict[str, Any] = {"models": [report.as_dict() for report in reports]}
    if plot is not None:
        _draw(plot, reports)
    if not only_json:
        _print_table(table_of(reports))
    if tensors and against is not None:
        figures["tensors"] = {model: _tensors(model, against, only_json=only_json) for model in models}
    print(json.dumps(figures))


def _require_svg(plot: Path) -> None:
    """Before the work: a picture goes where only a picture can be."""
    from kvarn.quantization.disk import require_folder

    if plot.suffix.lower() != ".svg" or (plot.exists() and not plot.is_file()):
        raise ConfigError(f"--plot is {str(plot)!r}; give a file whose name ends in .svg")
    require_folder(plot)


def _draw(plot: Path, reports: list[EvaluationReport]) -> None:
    """The picture appears, or replaces an older one, when it is whole."""
    from kvarn.evaluation.plot import bit_scale, plot_points, svg
    from kvarn.formats.gguf.new_file import NewFile

    drawn = svg(plot_points(reports), f"divergence from {reports[0].model}", bit_scale(reports))
    with closing(NewFile(plot.parent)) as new:
        new.file.write(drawn.encode())
        new.publish(plot)


def _tensors(model: str, against: str, *, only_json: bool) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from kvarn.config import is_offline
    from kvarn.evaluation.tensor_errors import tensor_errors
    from kvarn.hub import resolve

    path, source = (resolve(name, offline=is_offline()) for name in (model, against))
    found = list(tensor_errors(path, source))
    if not only_json:
        heading = [(f"tensors of {model}", "type", "source", "MB", "error", "dB")]
        _print_table(
            heading
            + [
                (
                    one.name,
                    one.type,
                    one.source_type,
                    f"{one.num_bytes / 1e6:.3f}",
                    f"{one.relative_rms:.2%}",
                    f"{one.signal_db:.1f}",
                )
                for one in found
            ]
        )
    return [asdict(one) for one in found]


def _print_table(cells: Sequence[tuple[str, ...]]) -> None:
    for line in table_lines(cells):
        print(printable(line).rstrip())
    print()
