from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.models.spec import ModelSpec

_Int32 = npt.NDArray[np.int32]
_Float32 = npt.NDArray[np.float32]
_UInt8 = npt.NDArray[np.uint8]
_UInt32 = npt.NDArray[np.uint32]
_UInt64 = npt.NDArray[np.uint64]

kv_block_size: int
kernels: Any

class ThreadTeam:
    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def progress(self) -> int: ...

# numbers, wholes, bias_ids, bias_values, bias_starts, seen_ids, seen_counts, seen_starts, masked_rows, masks
ChoiceArrays = tuple[_Float32, _UInt64, _Int32, _Float32, _Int32, _Int32, _Int32, _Int32, _Int32, _UInt32]

# sequence, block_start, block_end, num_kept, table, per_head, pool_kernel
KeepArrays = tuple[int, int, int, int, _Int32, bool, int]

def packed_bytes(type: int, parts: int, rows: int, columns: int) -> int: ...
def pool_threads() -> int: ...
def cpu_features() -> list[str]: ...
def isa_names() -> list[str]: ...
def kernel_origins(table: str) -> dict[str, str]: ...

class Passage:
    @property
    def piece_s(self) -> float: ...

class Model:
    def __init__(self, spec: ModelSpec, pool: ThreadTeam, isa: str) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def logit_bytes(self) -> int: ...
    def reserve_weights(self, bytes: int) -> None: ...
    def add_matrices(self, name: str, type: int, parts: int, rows: int, columns: int, raw: _UInt8) -> None: ...
    def add_vector(self, name: str, values: _Float32) -> None: ...
    def finish_loading(self) -> None: ...
    def reserve_kv(self, layers: Sequence[tuple[int, int]], dtype: str, num_blocks: int, block_bytes: int) -> None: ...
    def copy_block(self, source: int, target: int) -> None: ...
    def return_block(self, block: int) -> None: ...
    def forward(
        self,
        token_ids: _Int32,
        positions: _Int32,
        row_starts: _Int32,
        context_lens: _Int32,
        block_tables: _Int32,
        output_rows: _Int32,
        slot_shifts: _Int32,
        keep: Sequence[KeepArrays],
        out: _Float32,
    ) -> None: ...
    def begin(
        self,
        token_ids: _Int32,
        positions: _Int32,
        row_starts: _Int32,
        context_lens: _Int32,
        block_tables: _Int32,
        output_rows: _Int32,
        slot_shifts: _Int32,
        keep: Sequence[KeepArrays],
    ) -> Passage: ...
    def advance(self, passage: Passage, seconds: float, out: _Float32) -> bool: ...
    def logits(self, hidden: _Float32, out: _Float32) -> None: ...
    def sample(
        self,
        hidden: _Float32,
        rows: _Int32,
        partners: _Int32,
        choices: ChoiceArrays,
        want_logprobs: bool,
        token_ids: _Int32,
        logprobs: _Float32,
        entropy: _Float32,
        top_ids: _Int32,
        top_logprobs: _Float32,
    ) -> None: ...
    def score(
        self, hidden: _Float32, targets: _Int32, logprobs: _Float32, top_ids: _Int32, top_logprobs: _Float32
    ) -> None: ...
