"""What a GGUF file may hold here. Checked before anything is allocated; FormatError beyond it.

    what                          limit                reason
    metadata entries              2,048                real files have under 100
    key, tensor name              65,535 and 64 bytes  the GGUF specification
    decoded text, all together    8 MiB                str needs up to 4 bytes for a byte of the file
    strings in one array          1,048,576            the largest vocabularies have 262,144 tokens
    numbers in one array          bytes left in file   kept in the file's own type, not as Python objects
    arrays of arrays              refused              no key of any model uses them
    tensors                       32,768               large mixtures of experts have about 1,500
    dimensions, and each of them  4, 1 to 2^31 - 1     sizes reach C++ as int
    alignment                     8 to 65,536, 2^n     uint32, as the specification says
    tensor data                   in the file, aligned, not overlapping
    parts of a split file         1,000                5 digits in the name, but one open file each

Opening a file of n bytes allocates at most 2n + 64 MiB.
"""

from __future__ import annotations

from typing import Final

VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32

MAX_ENTRIES: Final = 2_048
MAX_KEY_BYTES: Final = 65_535
MAX_NAME_BYTES: Final = 64
MAX_TEXT_BYTES: Final = 8 << 20
MAX_STRINGS: Final = 1 << 20
MAX_LIST: Final = 128  # arrays up to this length become plain lists
MAX_TENSORS: Final = 32_768
MAX_DIMENSIONS: Final = 4
MAX_DIMENSION: Final = 2**31 - 1
MIN_ALIGNMENT: Final = 8
MAX_ALIGNMENT: Final = 65_536
MAX_PARTS: Final = 1_000

MIN_ENTRY_BYTES: Final = 8 + 1 + 4 + 1  # key length, key, type, value
MIN_TENSOR_BYTES: Final = 8 + 1 + 4 + 4 + 8  # name length, name, number of dimensions, type, offset
