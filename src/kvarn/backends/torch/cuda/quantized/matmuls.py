"""Which kernel computes a product with a quantised matrix: the packed one, or values written to scratch and then a
dense product of the same arithmetic. All give the same bits; for the rows of a decode step the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from kvarn.backends.torch.cuda import rows
from kvarn.backends.torch.cuda.choose import (
    NUM_COMPARED,
    TIMED_CALLS,
    Matmuls,
    refine_picks,
    replay_us,
)
from kvarn.backends.torch.cuda.matmul import Epilogue
from kvarn.backends.torch.cuda.pick_store import PickStore, Stored
from kvarn.backends.torch.cuda.quantized.pack import PackedMatrix, QuantizedMatrix
from kvarn.backends.torch.cuda.quantized.products import (
    ONE_ROW_TILINGS,
    AnyTiling,
    PackedTiling,
    PieceSums,
    compile_products,
    multiply_any,
    multiply_values,
    write_values,
)

SCRATCH_VALUES = 1 << 27  # of a matrix at a time; larger ones are multiplied in parts
MIN_VALUES_ROWS, MAX_PACKED_ROWS = 96, 256  # between them it is found by time whether values are written first
REFINED_ROWS, SAME_ROWS = (1, 8), {8: 4}  # steps in which picks are compared, and rows that take theirs
NUM_BESIDE_ONE_ROW = 2  # tilings that are timed beside those of the kernel for one row
PACKED_CLOSE, MAX_PACKED_CLOSE = 1.25, 5  # within so much of the fastest alone, so many are tried: steps differ much
TILINGS: dict[int, tuple[AnyTiling, ...]] = {  # by rows, the first one where nothing was timed
    size: tuple(PackedTiling(*one) for one in listed)
    for size, listed in {
        8: (
            (8, 32, 4, 2), (8, 32, 3, 2), (8, 64, 3, 2), (8, 16, 3, 1, 1), (8, 16, 2, 1, 1), (8, 16, 2, 1, 2),
            (8, 32, 2, 1, 1), (8, 32, 2, 2, 1), (8, 32, 3, 2, 2), (8, 64, 2, 2, 1), (8, 64, 3, 2, 1),
        ),
        16: ((16, 32, 4, 2), (16, 64, 3, 2), (16, 32, 4, 2, 2), (16, 64, 3, 2, 1)),
        32: ((32, 32, 4, 2), (32, 64, 4, 2), (32, 64, 4, 2, 1)),
        64: ((64, 64, 3, 4), (64, 64, 3, 4, 1), (64, 32, 4, 2)),
        128: ((128, 64, 3, 4), (64, 64, 3, 4), (64, 64, 3, 4, 2)),
    }.items()
}  # fmt: skip
Key = tuple[int, int, int, str, int, torch.dtype]


@dataclass(frozen=True, slots=True)
class _Timed:
    """A product that a kernel is chosen for; several matrices, so that none is timed from the cache."""

    x: Tensor
    parts: Sequence[PackedMatrix]
    out: Tensor
    epilogue: Epilogue
    is_late: bool  # behind another part of its matrix

    @classmethod
    def of(
        cls, parts: Sequence[PackedMatrix], num_rows: int, epilogue: Epilogue, dtype: torch.dtype, *, is_late: bool
    ) -> _Timed:
        (columns, depth), device = parts[0].shape, parts[0].low.device
        x = torch.randn(num_rows, depth, device=device).to(torch.bfloat16)
        width = columns // 2 if epilogue is Epilogue.SILU_GATED else columns
        return cls(x, parts, torch.zeros(num_rows, width, dtype=dtype, device=device), epilogue, is_late)

    @property
    def key(self) -> Key:
        return _key(self.x, self.parts[0], self.epilogue, self.out.dtype)

    @property
    def tilings(self) -> list[AnyTiling]:
        return tilings(len(self.x), self.parts[0], self.epilogue)


class QuantizedMatmuls(Matmuls):
    """The products of a model some of whose matrices are packed."""

    def __init__(self, store: PickStore | None = None) -> None:
        super().__init__(store)
        self.packed_picks: dict[Key, AnyTiling | None] = {}  # None: by values
        self._scratch: Tensor | None = None
        self._piece_sums: tuple[PieceSums, PieceSums] | None = None
        self._packed_close: dict[Key, list[AnyTiling | None]] = {}  # nearly as fast as what was picked

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
            is_apart = epilogue is Epilogue.SILU_GATED and len(weights[0].parts) > 1
            same = [one.parts[index] for one in weights[:TIMED_CALLS]]
            packed = [one for one in same if isinstance(one, PackedMatrix)]
            if isinstance(part, PackedMatrix):
                kept = Epilogue.STORE if is_apart else epilogue
                timed = [_Timed.of(packed, count, kept, dtype, is_late=index > 0) for count in num_rows]
                self._tune([one for one in timed if one.key not in self.packed_picks])

    def refine(self, num_rows: int, step_us: Callable[[], float]) -> None:
        super().refine(num_rows, step_us)
        if num_rows in REFINED_ROWS:
            refined = refine_picks(self.packed_picks, self._packed_close, num_rows, step_us)
            more = {}
            if num_rows in SAME_ROWS:
                more = {(SAME_ROWS[num_rows], *key[1:]): self.packed_picks[key] for key in refined}
                self.packed_picks |= more
            self._keep_packed([*refined, *more])

    def _tune(self, asked: Sequence[_Timed]) -> None:
        stored = {one.key: None if self._store is None else self._store.find(_name(one.key)) for one in asked}
        restored = {one.key: _restored(stored[one.key], one.tilings, len(one.x)) for one in asked}
        self.packed_picks |= {key: found[0] for key, found in restored.items() if found}
        timed = [one for one in asked if not restored[one.key] and len(one.x) not in SAME_ROWS.values()]
        compile_products(
            (one.x, one.parts[0], one.out, one.epilogue, tiling, self._sums(one.x)[0], is_late)
            for one in timed
            for tiling in one.tilings
            for is_late in {False, one.is_late}
        )
        for one in timed:
            times = {pick: self._time_us(pick, one) for pick in self._equal_picks(one)}
            best, *others = sorted(times, key=times.__getitem__)
            self.packed_picks[one.key] = best
            near = [pick for pick in others if times[pick] <= PACKED_CLOSE * times[best]]
            self._packed_close[one.key] = near[:MAX_PACKED_CLOSE]
        self._keep_packed([one.key for one in timed])

    def _keep_packed(self, keys: Iterable[Key]) -> None:
        """Store picks for the next start."""
        if self._store is not None:
            for key in keys:
                pick = self.packed_picks[key]
                self._store.add(_name(key), [None if pick is None else list(astuple(pick))])
            self._store.save()

    def _equal_picks(self, timed: _Timed) -> list[AnyTiling | None]:
        """Those whose bits are all the ones of the product by values, on a million of results."""
        (count, depth), part, width = timed.x.shape, timed.parts[0], timed.out.shape[1]
        trials = -(-NUM_COMPARED // (count * width))
        generator = torch.Generator(timed.x.device).manual_seed(0)
        x, held = (
            torch.randn(trials * count, size, device=timed.x.device, generator=generator).to(dtype)
            for size, dtype in ((depth, timed.x.dtype), (width, timed.out.dtype))
        )
        wanted = self._compute(None, x, part, held.clone(), timed.epilogue)

        def is_equal(tiling: AnyTiling) -> bool:
            found = held.clone()
            for some, values in zip(torch.split(found, count), torch.split(x, count), strict=True):
                self._compute(tiling, values, part, some, timed.epilogue)
            return torch.equal(found, wanted)

        picks: list[AnyTiling | None] = [tiling for tiling in timed.tilings if is_equal(tiling)]
        return picks if picks and count < MIN_VALUES_ROWS else [*picks, None]

    def _time_us(self, pick: AnyTiling | None, timed: _Timed) -> float:
        parts = [timed.parts[index % len(timed.parts)] for index in range(TIMED_CALLS)]
        return replay_us(lambda: [self._compute(pick, timed.x, one, timed.out, timed.epilogue) for one in parts])

    def _by_parts(self, x: Tensor, weight: QuantizedMatrix, out: Tensor, epilogue: Epilogue = Epilogue.STORE) -> Tensor:
        """Every part into its columns."""
        begin = 0
        for index, part in enumerate(weight.parts):
            columns = out[:, begin : begin + part.shape[0]]
            if isinstance(part, Tensor):
                self._dense(x, part, columns, epilogue)
            else:
                self._packed(x, part, columns, epilogue, index)
            begin += part.shape[0]
        return out

    def _packed(self, x: Tensor, part: PackedMatrix, out: Tensor, epilogue: Epilogue, index: int = 0) -> Tensor:
        """index: of the part; beginning while the one before it is computed, it has other scratch memory."""
        key = _key(x, part, epilogue, out.dtype)
        pick = None
        if len(x) <= MAX_PACKED_ROWS:
            pick = self.packed_picks[key] if key in self.packed_picks else tilings(len(x), part, epilogue)[0]
        return self._compute(pick, x, part, out, epilogue, index)

    def _compute(
        self, pick: AnyTiling | None, x: Tensor, part: PackedMatrix, out: Tensor, epilogue: Epilogue, index: int = 0
    ) -> Tensor:
        if pick is not None:
            scratch = self._sums(x)[index % 2]
            return multiply_any(x, part, out, epilogue, pick, scratch, is_late=index > 0)
        columns, depth = part.shape
        step = max(1, SCRATCH_VALUES // depth)
        if epilogue is Epilogue.SILU_GATED:
            whole = self._compute(None, x, part, x.new_empty(len(x), columns), Epilogue.STORE)
            return out.copy_(rows.activate(whole, "silu", gated=True))
        for begin in range(0, columns, step):
            count = min(step, columns - begin)
            values = self._values(part, begin, count, x.dtype)
            multiply_values(x, values, out[:, begin : begin + count], epilogue)
        return out

    def _dense(self, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        """Through the dense product's own choice, which may compute into other memory."""
        found = self._run(x, weight, out, epilogue)
        if found.data_ptr() != out.data_ptr():
            out.copy_(found)

    def _sums(self, x: Tensor) -> tuple[PieceSums, PieceSums]:
        if self._piece_sums is None:  # once: captured steps have its address
            self._piece_sums = PieceSums.new(x.device), PieceSums.new(x.device)
        return self._piece_sums

    def _values(self, part: PackedMatrix, first: int, count: int, dtype: torch.dtype) -> Tensor:
        if self._scratch is None:  # once: captured steps have its address
            self._scratch = torch.empty(SCRATCH_VALUES, dtype=dtype, device=part.low.device)
        return write_values(part, self._scratch[: count * part.shape[1]].view(count, -1), first)


def tilings(num_rows: int, part: PackedMatrix, epilogue: Epilogue) -> list[AnyTiling]:
    """Those to be timed for so many rows; never none."""
    listed = next((TILINGS[size] for size in TILINGS if num_rows <= size), TILINGS[max(TILINGS)])
    if one_row := [one for one in ONE_ROW_TILINGS if one.fits(part, epilogue, num_rows)]:
        listed = (*listed[:NUM_BESIDE_ONE_ROW], *one_row)
    return [one for one in listed if one.fits(part, epilogue, num_rows)] or [PackedTiling(16, 32, 2, 2)]


def _restored(stored: Stored | None, listed: Sequence[AnyTiling], num_rows: int) -> tuple[AnyTiling | None] | None:
    """A stored pick, if it is one that could be made here: a tiling, or None for values."""
    match stored:
        case [None] if num_rows >= MIN_VALUES_ROWS:
            return (None,)
        case [[*fields]]:
            return next(((one,) for one in listed if list(astuple(one)) == fields), None)
    return None


def _name(key: Key) -> str:
    *numbers, type, epilogue, dtype = key
    return " ".join([*map(str, numbers), type, str(epilogue), str(dtype).removeprefix("torch.")])


def _key(x: Tensor, part: PackedMatrix, epilogue: Epilogue, dtype: torch.dtype) -> Key:
    return len(x), *part.shape, part.type_name, int(epilogue), dtype
