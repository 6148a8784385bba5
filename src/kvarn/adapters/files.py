"""Adapters on disk: PEFT folders and GGUF files, read as pairs under canonical names. Hostile until checked.

A PEFT folder has adapter_config.json and adapter_model.safetensors with `MODULE.lora_A.weight` (rank, in) and
`MODULE.lora_B.weight` (out, rank); embeddings have `lora_embedding_A` (rank, tokens) and `lora_embedding_B`. A GGUF
adapter has general.type adapter, adapter.type lora, adapter.lora.alpha, and `NAME.lora_a`, `NAME.lora_b` in the same
shapes, but for the embedding's lora_a, which is (tokens, rank).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kvarn.adapters.peft_config import read_config
from kvarn.adapters.targets import FilePair, family_of, fit_adapter
from kvarn.adapters.weights import EMBEDDING, Float32, LoraWeights, LowRank
from kvarn.checks import short
from kvarn.errors import DoesNotFit, FormatError, ModelNotFound, UnsupportedModel
from kvarn.formats.hf_names import Dialect, translate
from kvarn.formats.quants import dequantize
from kvarn.formats.strict_json import read_object
from kvarn.models.spec import ModelSpec

MAX_BYTES = 8 << 30  # where nobody says what there is room for
BYTES_HELD = 2  # of a value: f16, the narrowest form in which backends hold pairs
CONFIG, SAFETENSORS = "adapter_config.json", "adapter_model.safetensors"
_PEFT_PAIR = re.compile(r"(?:base_model\.model\.)?(.{1,300})\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?")
_PEFT_BASE = re.compile(r"(?:base_model\.model\.)?(.{1,300})\.base_layer\.weight")
_GGUF_PAIR = re.compile(r"(.{1,300})\.weight\.lora_([ab])")


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """What a file says about itself, for `kvarn show`."""

    path: str
    format: str  # peft | gguf
    base: str | None  # the name of the model it was made for, where it says so
    architecture: str | None  # of GGUF files
    ranks: tuple[int, ...]  # ascending, each once
    targets: tuple[str, ...]  # as the file calls them, without the layer
    num_values: int


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An open adapter: every pair by name, read when asked for."""

    description: AdapterDescription
    pairs: tuple[FilePair, ...]  # of a folder: under the names of the folder

    def fit(self, spec: ModelSpec) -> LoraWeights:
        """The pairs of the model's matrices."""
        path, is_gguf = self.description.path, self.description.format == "gguf"
        entry = family_of(spec)
        if is_gguf and self.description.architecture not in entry.gguf:
            raise UnsupportedModel(
                f"{path}: the adapter is for {short(self.description.architecture)}, the model is {entry.title}; "
                "use the base it was made for",
                fields=("general.architecture",),
            )
        if not is_gguf and (entry.split is not None or entry.dialect == "encoder"):
            raise UnsupportedModel(
                f"{path}: PEFT adapters of {entry.title} are not read, because its weights are stored in another form",
                fields=("lora",),
            )
        pairs = list(self.pairs) if is_gguf else [_translated(one, entry.dialect, path) for one in self.pairs]
        return fit_adapter(spec, pairs, path, is_gguf=is_gguf)


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether this is a PEFT folder, by its files; GGUF files say so inside."""
    return os.path.isfile(os.path.join(path, CONFIG))


def open_adapter(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> AdapterFile:
    """Read a PEFT folder or a GGUF adapter, whole; one that needs more as f16 is refused before it is read."""
    name = os.fspath(path)
    if os.path.isdir(name):
        return _read_folder(name, max_bytes)
    if not os.path.exists(name):
        raise ModelNotFound(f"adapter {short(name)} is not here; give a PEFT folder or a GGUF adapter")
    return _read_gguf(name, max_bytes)


def _read_folder(folder: str, max_bytes: int) -> AdapterFile:
    from kvarn.formats.safetensors import SafetensorsFile

    if not is_adapter(folder):
        raise ModelNotFound(f"{folder}: the folder has no {CONFIG}; give the folder that PEFT saved")
    if not os.path.isfile(os.path.join(folder, SAFETENSORS)):
        raise ModelNotFound(f"{folder}: the folder has no {SAFETENSORS}; pickle files (.bin) are not read")
    config = read_config(read_object(os.path.join(folder, CONFIG)), folder)
    file = SafetensorsFile(os.path.join(folder, SAFETENSORS))
    try:
        for name in sorted(file.others):
            raise UnsupportedModel(f"{folder}: tensor {name!r} is {file.others[name]}; F32, F16 and BF16 can be read")

        def read(name: str) -> Float32:
            info = file.tensors[name]
            return dequantize(file.raw(name), info.type, info.shape)

        copies = {name for name in file.tensors if _PEFT_BASE.fullmatch(name)}
        halves = _halves([name for name in file.tensors if name not in copies], _peft_half, folder)
        _check_copies(copies, halves, folder)
        _check_copy_shapes(copies, halves, {name: file.tensors[name].shape for name in file.tensors}, folder)
        _check_size((file.tensors[name].shape for both in halves.values() for name in both.values()), max_bytes, folder)
        pairs = [
            FilePair(module, module, _peft_pair(module, names, read, config.rank_of(module), config.scale_of(module)))
            for module, names in halves.items()
        ]
        file.file.verify_unchanged()
    finally:
        file.file.close()
    return AdapterFile(_describe(folder, "peft", pairs, config.base, None), tuple(pairs))


def _peft_half(name: str) -> tuple[str, str] | None:
    found = _PEFT_PAIR.fullmatch(name)
    return None if found is None else (found.group(1), found.group(3).lower())


def _check_copies(names: Iterable[str], halves: Mapping[str, object], folder: str) -> None:
    """PEFT saves the base's own embedding and head beside pairs of theirs, which training leaves as they are."""
    for name in sorted(names):
        found = _PEFT_BASE.fullmatch(name)
        if found is None or found.group(1) not in halves:
            raise UnsupportedModel(f"{folder}: tensor {name!r} belongs to no pair; it is not supported", fields=(name,))


def _check_copy_shapes(
    copies: Iterable[str],
    halves: Mapping[str, Mapping[str, str]],
    shapes: Mapping[str, tuple[int, ...]],
    folder: str,
) -> None:
    """A copy is the matrix that its pair changes: one of another shape belongs to a base with other tokens."""
    for name in sorted(copies):
        found = _PEFT_BASE.fullmatch(name)
        both = halves[found.group(1)] if found is not None else {}
        (a, b) = (shapes[both[half]] for half in "ab")
        (rows, columns) = (b[:1], a[1:])
        wanted = columns + rows if "lora_embedding_" in both["a"] else rows + columns
        if shapes[name] != wanted:
            message = f"tensor {name!r} has shape {shapes[name]}, its pair changes one of {wanted}"
            raise FormatError(message, file=folder)


def _peft_pair(
    module: str, names: Mapping[str, str], read: Callable[[str], Float32], rank: int, scale: float
) -> LowRank:
    pair = LowRank(_matrix(read(names["a"]), names["a"]), _matrix(read(names["b"]), names["b"]), scale)
    if pair.rank != rank:
        raise FormatError(f"{names['a']!r} has rank {pair.rank}, {CONFIG} says {rank} for {module}")
    return pair


def _read_gguf(path: str, max_bytes: int) -> AdapterFile:
    from kvarn.formats.gguf.splits import open_gguf

    source = open_gguf(path)
    try:
        facts = source.metadata
        if facts.get("general.type") != "adapter" or facts.get("adapter.type") != "lora":
            raise UnsupportedModel(
                f"{path}: general.type is {short(facts.get('general.type'))} and adapter.type "
                f"{short(facts.get('adapter.type'))}; a LoRA adapter has adapter and lora",
                fields=("general.type", "adapter.type"),
            )
        if any(key.startswith("adapter.alora") for key in facts):
            raise UnsupportedModel(f"{path}: the adapter is an activated LoRA, which is not supported")
        alpha = facts.get("adapter.lora.alpha")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not np.isfinite(alpha):
            raise FormatError(f"adapter.lora.alpha is {short(alpha)}; expected a number", file=path)
        pairs = []
        _check_size((info.shape for info in source.tensors.values()), max_bytes, path)
        for name, names in _halves(source.tensors, _gguf_half, path).items():
            a, b = (_matrix(np.array(source.array(names[half]), np.float32), names[half]) for half in "ab")
            a = np.ascontiguousarray(a.T) if name == EMBEDDING else a
            # llama.cpp: an alpha of 0 means that pairs are not scaled.
            pairs.append(FilePair(name, name, LowRank(a, b, alpha / max(1, len(a)) if alpha else 1.0)))
        source.verify_unchanged()
    finally:
        source.close()
    architecture, base = facts.get("general.architecture"), facts.get("general.base_model.0.name")
    base = base if isinstance(base, str) else None
    return AdapterFile(
        _describe(path, "gguf", pairs, base, architecture if isinstance(architecture, str) else None), tuple(pairs)
    )


def _check_size(shapes: Iterable[tuple[int, ...]], max_bytes: int, path: str) -> None:
    needed = sum(map(math.prod, shapes)) * BYTES_HELD
    if needed > max_bytes:
        raise DoesNotFit(
            f"{path}: the adapter needs {needed:,} bytes as f16, {max_bytes:,} are allowed; raise lora_bytes",
            needed_bytes=needed,
            available_bytes=max_bytes,
        )


def _gguf_half(name: str) -> tuple[str, str] | None:
    found = _GGUF_PAIR.fullmatch(name)
    return None if found is None else (found.group(1), found.group(2))


def _halves(
    names: Iterable[str], parse: Callable[[str], tuple[str, str] | None], path: str
) -> dict[str, dict[str, str]]:
    """The two tensors of each pair, by what they change; everything else in the file is refused."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        parsed = parse(name)
        if parsed is None:
            raise UnsupportedModel(
                f"{path}: tensor {name!r} is no half of a pair; whole modules, added tokens and DoRA are not supported",
                fields=(name,),
            )
        halves = found.setdefault(parsed[0], {})
        if parsed[1] in halves:
            raise FormatError(f"tensors {halves[parsed[1]]!r} and {name!r} are the same half of a pair", file=path)
        halves[parsed[1]] = name
    for stem, halves in found.items():
        if len(halves) != 2:
            raise FormatError(f"the pair of {stem} lacks one half: only {next(iter(halves.values()))!r}", file=path)
    if not found:
        raise FormatError("the adapter has no pairs", file=path)
    return found


def _matrix(values: Float32, name: str) -> Float32:
    if values.ndim != 2:
        raise FormatError(f"tensor {name!r} has shape {values.shape}; half of a pair is a matrix")
    return np.ascontiguousarray(values, np.float32)


def _translated(one: FilePair, dialect: Dialect, path: str) -> FilePair:
    canonical = translate(f"{one.stored_name}.weight", dialect)
    if canonical is None:
        raise UnsupportedModel(
            f"{path}: module {one.stored_name!r} is not one of this model; the adapter was made for another base",
            fields=(one.stored_name,),
        )
    return FilePair(canonical.removesuffix(".weight"), one.stored_name, one.pair)


def _describe(
    path: str, kind: str, pairs: list[FilePair], base: str | None, architecture: str | None
) -> AdapterDescription:
    return AdapterDescription(
        path=path,
        format=kind,
        base=base,
        architecture=architecture,
        ranks=tuple(sorted({one.pair.rank for one in pairs})),
        targets=tuple(sorted({one.name.rpartition(".")[2] for one in pairs})),
        num_values=sum(one.pair.num_values for one in pairs),
    )
