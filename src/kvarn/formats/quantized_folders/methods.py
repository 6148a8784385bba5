"""Which quantised folders are read: quant_method of config.json's quantization_config, or of compression_config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy.typing as npt

from kvarn.checks import short
from kvarn.formats.quantized_folders import awq, compressed_tensors, fp8, gptq, mxfp4_pairs
from kvarn.formats.quantized_folders.matrix import Folder, Quantized, StoredTensor

METHODS: Final[Mapping[str, Callable[[Folder], Quantized]]] = {
    "awq": awq.find,
    "compressed-tensors": compressed_tensors.find,
    "fbgemm_fp8": fp8.find,
    "fp8": fp8.find,
    "gptq": gptq.find,
    "mxfp4": mxfp4_pairs.find,
}
KEYS: Final = ("quantization_config", "compression_config")


def find_quantized(
    path: str, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], read: Callable[[str], npt.NDArray[Any]]
) -> Quantized:
    """The quantised tensors of a folder: none where config.json names no method; an unknown one is refused."""
    entry = next((config[key] for key in KEYS if config.get(key)), None)
    if entry is None:
        return Quantized({})
    folder = Folder(path, entry if isinstance(entry, Mapping) else {}, tensors, read)
    method = folder.config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise folder.unsupported(f"the weights are quantised by {short(method)}; known are {', '.join(METHODS)}")
    return METHODS[method](folder)
