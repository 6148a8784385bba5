"""`kvarn quantize` and `kvarn imatrix`: smaller files of a model, and what they are calibrated with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn.cli.terminal.options import Threads
from kvarn.cli.terminal.progress import progress_bar
from kvarn.cli.terminal.text import printable
from kvarn.errors import ConfigError

if TYPE_CHECKING:
    from kvarn.quantization.allocation.allocate import SizeTarget
    from kvarn.quantization.quantize import QuantizeOptions
    from kvarn.quantization.report import QuantizationReport

Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write; it appears when it is whole.")]
MAX_NAMED_FALLBACKS = 8


@dataclass(frozen=True, slots=True)
class SizeFlags:
    """A size instead of a type."""

    num_bytes: Annotated[int | None, typer.Option("--bytes", metavar="N", help="Size of the file, from below.")] = None
    bpw: Annotated[float | None, typer.Option("--bpw", metavar="X", help="Bits per weight, from below.")] = None

    def target(self, type: str | None) -> str | SizeTarget:
        """The type, or the size; exactly one of them must have been given."""
        from kvarn.quantization.allocation.allocate import SizeTarget

        values = {"TYPE": type, "--bytes": self.num_bytes, "--bpw": self.bpw}
        given = [name for name, value in values.items() if value is not None]
        if len(given) != 1:
            raise ConfigError(f"{' and '.join(given) or 'no type and no size'} given; give one of TYPE, --bytes, --bpw")
        return SizeTarget(self.num_bytes, self.bpw) if type is None else type


@dataclass(frozen=True, slots=True)
class QuantizeFlags:
    """How a file is made."""

    imatrix: Annotated[
        Path | None, typer.Option("--imatrix", help="Weigh errors by this file of `kvarn imatrix` or llama-imatrix.")
    ] = None
    pure: Annotated[bool, typer.Option("--pure", help="The same type for every matrix, no mix.")] = False
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Round weights that were rounded before; keeps both errors.")
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")] = False
    threads: Threads = None
    method: Annotated[
        str | None,
        typer.Option(
            "--method", help="rtn, imatrix, awq, gptq, smoothquant. [default: imatrix with --imatrix, else rtn]"
        ),
    ] = None
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="Measure on this text: a size, awq, gptq, smoothquant; repeat for more."),
    ] = None

    measured: Annotated[
        Path | None,
        typer.Option("--measured", help="Of a size: keep what was measured in this file, for the next size."),
    ] = None

    def options(self) -> QuantizeOptions:
        """The same for the function behind the command."""
        from kvarn.quantization.quantize import QuantizeOptions

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return QuantizeOptions(**values | {"text": tuple(self.text or ())})


def quantize(
    *,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="F32, F16 or BF16 model: a GGUF file or a folder.")],
    type: Annotated[
        str | None, typer.Argument(metavar="[TYPE]", help="Q4_K_M, Q5_K_M, Q6_K, Q8_0, Q4_0, IQ4_NL, F16, FP8_ROW, ...")
    ] = None,
    output: Output,
    size: SizeFlags,
    flags: QuantizeFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with every tensor.")] = False,
) -> None:
    """Write a smaller file of a model, which llama.cpp reads, too.

    TYPE is a block type or one of llama.cpp's mixes, which give more bits to the tensors that need them:

      F32 F16 BF16  Q8_0  Q6_K  Q5_K_M Q5_K_S Q5_1 Q5_0  Q4_K_M Q4_K_S Q4_1 Q4_0 IQ4_NL IQ4_XS MXFP4 MXFP4_MOE
      Q3_K_L Q3_K_M Q3_K_S  Q2_K Q2_K_S

    Q8_0 is as good as the source, Q4_K_M with --imatrix the usual choice, below it quality falls fast: measure it with
    `kvarn evaluate OUT --against SOURCE --text FILE`. Where a type does not fit a tensor's rows, which is told, it gets
    the next larger one that does. FP8_TENSOR, FP8_ROW and FP8_BLOCK (128 x 128) make a folder of a folder.

    With --bytes or --bpw every tensor gets a type of its own: the divergence that the rounding of each one causes on
    --text is measured, and the types are chosen that cause the least. --measured FILE keeps the figures for the next.

    --method gptq --text FILE lets the columns of a matrix make good each other's errors: slower, much better.

    Example: kvarn quantize model-f16.gguf Q4_K_M --imatrix model.imatrix -o model-q4.gguf

    Example: kvarn quantize model-f16.gguf --bpw 4.8 --text wiki.txt --imatrix model.imatrix -o model-48.gguf
    """
    from kvarn.quantization.quantize import quantize as write

    wanted, options = size.target(type), flags.options()
    with progress_bar() as draw:
        report = write(source, wanted, output, options=options, progress=draw)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print_report(report)


def imatrix(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model to quantise, best as F16 or Q8_0.")],
    text: Annotated[list[Path], typer.Option("--text", help="UTF-8 text the model shall be good at; repeat for more.")],
    output: Output,
    chunks: Annotated[int, typer.Option("--chunks", min=0, help="Chunks of the text to use; 0: all.")] = 0,
    context: Annotated[int, typer.Option("--context", help="Tokens of a chunk.")] = 512,
    merge: Annotated[list[Path] | None, typer.Option("--merge", help="Add this imatrix; repeat for more.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the output file stopped.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")] = False,
    threads: Threads = None,
) -> None:
    """Measure which columns of every matrix matter, for `kvarn quantize --imatrix`.

    Runs a text through the model and sums up the squares of what each matrix reads. The file has the format of
    llama-imatrix and may be used with llama-quantize; it also holds the mean and the largest magnitudes. 100 chunks and
    more of varied text are usual. Do not evaluate with the same text: `kvarn evaluate` refuses it.

    Example: kvarn imatrix model-f16.gguf --text wiki.txt --text code.txt -o model.imatrix
    """
    from kvarn.quantization.collect import ImatrixOptions, collect_imatrix

    options = ImatrixOptions(chunks or None, context, threads, tuple(merge or ()), resume, force)
    with progress_bar() as draw:
        matrix = collect_imatrix(model, output, text=text, options=options, progress=draw)
    print(
        f"{output}: {len(matrix.entries):,} matrices, {matrix.num_chunks:,} chunks of {matrix.chunk_size:,} tokens "
        f"of {printable(', '.join(matrix.datasets))}"
    )
    if matrix.unobserved:
        _print_evenly_weighted(matrix.unobserved)
        print("  what recurrent layers, latent attention and shared experts read is not observed")


def _print_evenly_weighted(names: Sequence[str]) -> None:
    """The matrices of which an imatrix says nothing."""
    named = printable(", ".join(names[:MAX_NAMED_FALLBACKS]))
    others = ", ..." if len(names) > MAX_NAMED_FALLBACKS else ""
    what = "1 matrix has" if len(names) == 1 else f"{len(names):,} matrices have"
    print(f"  {what} no statistics in the imatrix, all columns weigh the same: {named}{others}")


def _print_report(report: QuantizationReport) -> None:
    counts = ", ".join(f"{number} {type}" for type, number in report.types().items())
    print(
        f"{printable(report.output)}: {report.num_bytes / 1e6:,.1f} MB of {report.source_bytes / 1e6:,.1f} MB, "
        f"{report.bits_per_weight:.3f} bits per weight, {report.seconds:.1f} s"
    )
    print(f"  {counts}")
    if report.requantized:
        types = ", ".join(sorted({change.source.type.name for change in report.requantized}))
        print(
            f"  {len(report.requantized)} tensors were quantised already ({types}): what their first rounding lost "
            "stays lost, and the second adds its own; a float source gives a better file of this size"
        )
    if report.unweighted:
        _print_evenly_weighted([change.source.name for change in report.unweighted])
    if report.kl is not None:
        print(f"  KL {report.kl:.5f} on the text; judge the file by another one with `kvarn evaluate`")
    for change in report.fallbacks[:MAX_NAMED_FALLBACKS]:
        rows = f"rows of {change.source.shape[-1]:,}"
        name = printable(change.source.name)
        print(f"  {name}: {change.wanted.name} does not fit {rows}, now {change.type.name}")
    if len(report.fallbacks) > MAX_NAMED_FALLBACKS:
        print(f"  and {len(report.fallbacks) - MAX_NAMED_FALLBACKS} more like these; --json lists them")
