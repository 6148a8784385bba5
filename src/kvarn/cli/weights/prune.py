"""`kvarn prune`: a model without the parts that matter least."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn.cli.terminal.options import Threads
from kvarn.cli.terminal.progress import progress_bar
from kvarn.cli.terminal.text import printable
from kvarn.cli.weights.quantize import Output
from kvarn.errors import ConfigError

if TYPE_CHECKING:
    from kvarn.pruning.options import PruneOptions, PruneTarget
    from kvarn.pruning.report import PruningReport
    from kvarn.quantization.allocation.allocate import SizeTarget


@dataclass(frozen=True, slots=True)
class RemovalFlags:
    """What goes."""

    keep: Annotated[
        float | None, typer.Option("--keep", metavar="X", help="Share of the weights of all layers to keep: 0.9.")
    ] = None
    layers: Annotated[int | None, typer.Option("--layers", metavar="N", help="Layers to remove.")] = None
    ffn: Annotated[
        float | None, typer.Option("--ffn", metavar="R", help="Ratio of the feed-forward's channels to remove: 0.1.")
    ] = None
    heads: Annotated[
        float | None, typer.Option("--heads", metavar="R", help="Ratio of the attention heads to remove.")
    ] = None
    num_bytes: Annotated[
        int | None,
        typer.Option(
            "--bytes",
            metavar="N",
            help="Most bytes of the file: alone by removing, in steps of 32 or 256 channels; with one of the above by "
            "types, to 0.5%.",
        ),
    ] = None

    @property
    def has_parts(self) -> bool:
        return any(value is not None for value in (self.keep, self.layers, self.ffn, self.heads))

    def target(self) -> PruneTarget:
        """The same for the function behind the command."""
        from kvarn.pruning.options import PruneTarget

        if not self.has_parts and self.num_bytes is None:
            raise ConfigError("nothing to remove; give --keep X, --layers N, --ffn R, --heads R or --bytes N")
        num_bytes = None if self.has_parts else self.num_bytes
        return PruneTarget(self.keep, num_bytes, self.layers, self.ffn, self.heads)

    def then(self, type: str | None) -> str | SizeTarget | None:
        """What the result is quantised to: a type, or the bytes where parts to remove are given, too."""
        from kvarn.quantization.allocation.allocate import SizeTarget

        if not self.has_parts or self.num_bytes is None:
            return type
        if type is not None:
            raise ConfigError("--then and --bytes given; the result is quantised to a type or to a size, give one")
        return SizeTarget(self.num_bytes)


@dataclass(frozen=True, slots=True)
class PruneFlags:
    """How it goes."""

    text: Annotated[
        list[Path] | None, typer.Option("--text", help="UTF-8 text to measure on; repeat for more files.")
    ] = None
    by: Annotated[
        str, typer.Option("--by", help="influence, activation, flap; magnitude, l2, random to compare with.")
    ] = "influence"
    refit: Annotated[bool, typer.Option("--refit/--no-refit", help="Fit what stays to what went.")] = True
    then: Annotated[str | None, typer.Option("--then", metavar="TYPE", help="Quantise the result: Q4_K_M.")] = None
    heal: Annotated[
        float | None, typer.Option("--heal", metavar="MINUTES", help="Distil from the source for so long, with torch.")
    ] = None
    heal_steps: Annotated[
        int | None, typer.Option("--heal-steps", metavar="N", help="Exactly so many steps; the same seed repeats them.")
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="Of healing and of random choices.")] = 18
    requantize: Annotated[
        bool, typer.Option("--requantize", help="With --then or --bytes: round what was rounded before.")
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")] = False
    threads: Threads = None

    def options(self, then: str | SizeTarget | None) -> PruneOptions:
        """The same for the function behind the command."""
        from kvarn.pruning.options import PruneOptions

        return PruneOptions(
            text=tuple(self.text or ()),
            by=self.by,
            refit=self.refit,
            then=then,
            heal_minutes=self.heal,
            heal_steps=self.heal_steps,
            requantize=self.requantize,
            force=self.force,
            threads=self.threads,
            seed=self.seed,
        )


def prune(
    *,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The model: a GGUF file or a folder, best in F16.")],
    output: Output,
    removal: RemovalFlags,
    flags: PruneFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with every measurement.")] = False,
) -> None:
    """Write a model without the layers, channels and heads that matter least, which llama.cpp reads, too.

    --keep 0.9 removes a tenth of the weights of all layers (the embedding is not counted); --bytes N as much as the
    file needs, in steps of 32 channels (256 where ffn_down is a K-quant), so that it may stay some percent below N;
    --keep X --bytes N hits a size by types. The split over layers, heads and channels is measured on --text: the one
    nearest to the source's predictions is written. Or say what goes: --layers 3, --ffn 0.1, --heads 0.25, alone or
    together. Heads go as whole KV groups or as equally many query heads of each group.

    What stays of ffn_down and attn_output is fitted to the outputs of the whole matrices on --text.

    --by: influence leaves out the layers that turn the residual stream least, and channels and heads that add least to
    it; activation is the same for channels and heads, flap looks at the variance of what they add. magnitude, l2 and
    random look at no activations: they are for comparison, and how much worse they are is measured and told.

    A tenth costs a small model a quarter to a half of its perplexity. --heal MINUTES brings part of that back by
    distilling from the source on the text (torch, best with a GPU). Judge the result by another text: kvarn evaluate
    OUT --against SOURCE --text FILE. Dense models of llama, qwen2, qwen3 and gemma3 can be pruned.

    Example: kvarn prune model-f16.gguf --keep 0.9 --text wiki.txt -o smaller.gguf

    Example: kvarn prune model-f16.gguf --layers 2 --ffn 0.1 --text wiki.txt --then Q4_K_M -o smaller-q4.gguf
    """
    from kvarn.pruning.prune import prune as write

    target, options = removal.target(), flags.options(removal.then(flags.then))
    with progress_bar() as draw:
        report = write(source, target, output, options=options, progress=draw)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print_report(report)
    _print_warnings(report)


def _print_report(report: PruningReport) -> None:
    before, after = report.before, report.after
    print(
        f"{printable(report.output)}: {after.num_bytes / 1e6:,.1f} MB of {before.num_bytes / 1e6:,.1f} MB, "
        f"{report.kept:.1%} of the weights of all layers, {report.seconds:.1f} s"
    )
    print(f"  {after.shape}; before: {before.shape}")
    if report.budget_bytes is not None and after.shape == before.shape:
        print(f"  the source has no more than the {report.budget_bytes:,} bytes allowed: nothing was removed")
    elif report.budget_bytes is not None:
        print(
            f"  {after.num_bytes / report.budget_bytes:.2%} of the {report.budget_bytes:,} bytes allowed: channels go "
            f"by {report.channel_step}; with --keep X --bytes N types fill the rest"
        )
    if report.removed_layers:
        print(f"  layers removed: {', '.join(map(str, report.removed_layers))}")
    if report.kl is not None:
        print(
            f"  KL {report.kl:.4f}, perplexity {after.perplexity:.2f} of {before.perplexity:.2f} on the text; judge "
            "the file by another one with `kvarn evaluate`"
        )
    if report.healing is not None:
        healing = report.healing
        print(
            f"  healed on {healing.device}: {healing.steps:,} steps, {healing.num_tokens:,} tokens, "
            f"{healing.seconds:.0f} s, KL {healing.losses[0]:.3f} -> {healing.losses[1]:.3f}"
        )


def _print_warnings(report: PruningReport) -> None:
    for warning in report.warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
