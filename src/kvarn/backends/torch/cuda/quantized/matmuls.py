"""Which kernel computes a product with a quantised matrix: the packed one, or values written to scratch and then
whatever computes the dense product. All give the same bits; for the rows of a decode step the fastest is found by time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvarn.backends.torch.cuda import rows
from kvarn.backends.torch.cuda.choose import TIMED_CALLS, Matmuls, random_rows, replay_us
from kvarn.backends.torch.cuda.matmul import Epilogue
from kvarn.backends.torch.cuda.quantized.pack import PackedMatrix, QuantizedMatrix
from kvarn.backends.torch.cuda.quantized.products import PackedTiling, multiply_packed, write_values

SCRATCH_VALUES = 1 << 27  # of a matrix at a time; larger ones are multiplied in parts
MAX_PACKED_ROWS = 256  # more are multiplied by values in any case
TILINGS = {  # by rows, the first one where nothing was timed
    16: ((32, 4, 2), (16, 6, 1), (64, 4, 4), (64, 3, 4)),
    32: ((32, 4, 2), (64, 4, 4)),
    64: ((64, 3, 4), (32, 4, 2)),
    128: ((64, 3, 4), (128, 3, 8)),
}
Key = tuple[int, int, int, str, int, torch.dtype]


class QuantizedMatmuls(Matmuls):
    """The products of a model some of whose matrices are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.packed_picks: dict[Key, PackedTiling | None] = {}  # None: by values
        self._scratch: Tensor | None = None

    def __call__(self, x: Tensor, weight: Tensor | QuantizedMatrix) -> Tensor:
        if isinstance(weight, Tensor):
            return super().__call__(x, weight)
        return self._by_parts(x, weight, x.new_empty(len(x), len(weight)))

    def in_float32(self, x: Tensor, weight: Tensor | QuantizedMatrix) -> Tensor:
        if isinstance(weight, Tensor):
            return super().in_float32(x, weight)
        return self._by_parts(x, weight, x.new_empty(len(x), len(weight), dtype=torch.float32))

    def add(self, residual: Tensor, x: Tensor, weight: Tensor | QuantizedMatrix) -> Tensor:
        if isinstance(weight, Tensor):
            return super().add(residual, x, weight)
        return self._by_parts(x, weight, residual, Epilogue.ADD)

    def gated(self, x: Tensor, weight: Tensor | QuantizedMatrix) -> Tensor:
        if isinstance(weight, Tensor):
            return super().gated(x, weight)
        (first, *more) = weight.parts
        if more or isinstance(first, Tensor):
            return rows.activate(self(x, weight), "silu", gated=True)
        return self._packed(x, first, x.new_empty(len(x), len(weight) // 2), Epilogue.SILU_GATED)

    def lookup(self, tokens: QuantizedMatrix, token_ids: Tensor) -> Tensor:
        """Rows of an embedding."""
        (part,) = tokens.parts
        assert isinstance(part, PackedMatrix), "a matrix of one dense part is a tensor"
        out = torch.empty(len(token_ids), tokens.shape[1], dtype=tokens.dtype, device=tokens.device)
        return write_values(part, out, ids=token_ids)

    def tune_quantized(
        self, weights: Sequence[QuantizedMatrix], num_rows: Iterable[int], epilogue: Epilogue, dtype: torch.dtype
    ) -> None:
        """Choose by time for matrices of one shape and the same types."""
        for index, part in enumerate(weights[0].parts):
            if isinstance(part, Tensor):
                continue
            is_gated = epilogue is Epilogue.SILU_GATED and len(weights[0].parts) > 1
            same = [one.parts[index] for one in weights[:TIMED_CALLS]]
            packed = [one for one in same if isinstance(one, PackedMatrix)]
            for count in num_rows:
                self._tune(packed, count, Epilogue.STORE if is_gated else epilogue, dtype)

    def _tune(self, parts: Sequence[PackedMatrix], count: int, epilogue: Epilogue, dtype: torch.dtype) -> None:
        x = random_rows(count, torch.empty(0, parts[0].shape[1], dtype=torch.bfloat16, device=parts[0].low.device))
        key = _key(x, parts[0], epilogue, dtype)
        if key in self.packed_picks:
            return
        width = parts[0].shape[0] // 2 if epilogue is Epilogue.SILU_GATED else parts[0].shape[0]
        out = torch.zeros(count, width, dtype=dtype, device=x.device)
        picks: list[PackedTiling | None] = [*tilings(count, parts[0], epilogue)]
        if count > max(TILINGS) // 2:
            picks.append(None)

        def time_us(pick: PackedTiling | None) -> float:
            calls = [parts[index % len(parts)] for index in range(TIMED_CALLS)]
            return replay_us(lambda: [self._compute(pick, x, one, out, epilogue) for one in calls])

        self.packed_picks[key] = min(picks, key=time_us)

    def _by_parts(self, x: Tensor, weight: QuantizedMatrix, out: Tensor, epilogue: Epilogue = Epilogue.STORE) -> Tensor:
        """Every part into its columns."""
        begin = 0
        for part in weight.parts:
            columns = out[:, begin : begin + part.shape[0]]
            if isinstance(part, Tensor):
                self._dense(x, part, columns, epilogue)
            else:
                self._packed(x, part, columns, epilogue)
            begin += part.shape[0]
        return out

    def _packed(self, x: Tensor, part: PackedMatrix, out: Tensor, epilogue: Epilogue) -> Tensor:
        if len(x) > MAX_PACKED_ROWS:
            return self._compute(None, x, part, out, epilogue)
        key = _key(x, part, epilogue, out.dtype)
        pick = self.packed_picks[key] if key in self.packed_picks else next(iter(tilings(len(x), part, epilogue)))
        return self._compute(pick, x, part, out, epilogue)

    def _compute(
        self, pick: PackedTiling | None, x: Tensor, part: PackedMatrix, out: Tensor, epilogue: Epilogue
    ) -> Tensor:
        if pick is not None:
            return multiply_packed(x, part, out, epilogue, pick)
        columns, depth = part.shape
        step = max(1, SCRATCH_VALUES // depth)
        if epilogue is Epilogue.SILU_GATED:
            whole = self._compute(None, x, part, x.new_empty(len(x), columns), Epilogue.STORE)
            return out.copy_(rows.activate(whole, "silu", gated=True))
        for begin in range(0, columns, step):
            count = min(step, columns - begin)
            values = self._values(part, begin, count, x.dtype)
            self._dense(x, values, out[:, begin : begin + count], epilogue)
        return out

    def _dense(self, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        """Through the dense product's own choice, which may compute into other memory."""
        found = self._run(x, weight, out, epilogue)
        if found.data_ptr() != out.data_ptr():
            out.copy_(found)

    def _values(self, part: PackedMatrix, first: int, count: int, dtype: torch.dtype) -> Tensor:
        if self._scratch is None:  # once: captured steps have its address
            self._scratch = torch.empty(SCRATCH_VALUES, dtype=dtype, device=part.low.device)
        return write_values(part, self._scratch[: count * part.shape[1]].view(count, -1), first)


def tilings(num_rows: int, part: PackedMatrix, epilogue: Epilogue) -> list[PackedTiling]:
    """Those to be timed for so many rows; never none."""
    matrices = 2 if epilogue is Epilogue.SILU_GATED else 1
    tile_rows = next((size for size in TILINGS if num_rows <= size), max(TILINGS))
    found = [PackedTiling(tile_rows, *one) for one in TILINGS[tile_rows]]
    return [one for one in found if one.fits(part.packing.bits, matrices)] or [PackedTiling(16, 32, 2, 2)]


def _key(x: Tensor, part: PackedMatrix, epilogue: Epilogue, dtype: torch.dtype) -> Key:
    return len(x), *part.shape, part.type.name, int(epilogue), dtype
