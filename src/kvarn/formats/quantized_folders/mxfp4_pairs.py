"""MXFP4 of folders: X_blocks (..., blocks, 16) and X_scales (..., blocks) are the tensor X, run as Q8_0 exactly."""

from __future__ import annotations

from kvarn.formats.quantized_folders.matrix import Bytes, Floats, Folder, Quantized, QuantizedTensor
from kvarn.formats.quants import dequantize
from kvarn.formats.stored_types import mxfp4
from kvarn.formats.weights import TensorInfo, TensorType

Q8_0 = TensorType.Q8_0


def find(folder: Folder) -> Quantized:
    """The experts of a folder."""
    stems = sorted({*folder.stems("_blocks"), *folder.stems("_scales")})
    notes = ("MXFP4 weights are run as Q8_0: the same values",) if stems else ()
    return Quantized({stem: _pair(folder, stem) for stem in stems}, notes=notes)


def _pair(folder: Folder, name: str) -> QuantizedTensor:
    parts = (f"{name}_blocks", f"{name}_scales")
    blocks, scales = (folder.tensors[part].shape if part in folder.tensors else () for part in parts)
    is_bytes = all(folder.tensors[part].dtype == "U8" for part in parts if part in folder.tensors)
    if len(blocks) < 2 or blocks[-1] != 16 or scales != blocks[:-1] or name in folder.tensors or not is_bytes:
        raise folder.error(f"{parts[0]} is {blocks} and {parts[1]} {scales}; expected bytes (..., 16) and (...)")
    info = TensorInfo(name, Q8_0, (*blocks[:-2], blocks[-2] * Q8_0.block_values))

    def packed(rows: slice) -> Bytes:
        codes, exponents = (folder.read(part) for part in parts)
        some = codes.reshape(-1, blocks[-2], 16)[rows], exponents.reshape(-1, blocks[-2])[rows]
        return mxfp4.pair_as_q8_0(some[0].reshape(-1), some[1].reshape(-1), name)

    def dense(rows: slice) -> Floats:
        stored = packed(rows)
        return dequantize(stored, Q8_0, (stored.size // Q8_0.num_bytes(info.shape[-1]), info.shape[-1]))

    return QuantizedTensor(info, parts, packed, dense)
