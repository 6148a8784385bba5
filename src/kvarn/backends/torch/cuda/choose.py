"""Which kernel computes each product: the fastest among those that give the same bits, by shape alone.

The vendor's library is fastest for many rows and nearly always computes the same chain; where it was seen not to, our
own kernel does. For the few numbers of rows of a decode step several tilings are timed as well, when a model of its
shape is loaded for the first time, alone and then, those nearly as fast as the fastest, within whole steps:
pick_store.py keeps what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvarn.backends.torch.cuda import rows
from kvarn.backends.torch.cuda.matmul import TILINGS, Epilogue, Tiling, compile_products, default_tiling, multiply
from kvarn.backends.torch.cuda.pick_store import PickStore, Stored

NUM_COMPARED = 1 << 20  # results
LIBRARY_DEPTH = 64  # an inner dimension that is no multiple of it is padded by the library in its own way
FEW_ROWS = 16  # the library is not tried for so few
TIMED_CALLS = 8  # in one captured graph, over as many weights
TIMED_REPLAYS = 3
CLOSE, MAX_CLOSE = 1.06, 3  # within so much of the fastest alone, so many at most are tried within steps ...
CLOSE_ROWS = 64  # ... of so many rows: more are not bound by what their weights wait for
LEAST_GAIN = 0.998  # of a step's time, beyond its noise
CANDIDATES = tuple(
    Tiling(*one)
    for one in (
        (16, 64, 128, 6, 4, True),
        (16, 32, 256, 4, 4, True),
        (16, 32, 128, 8, 4, True),
        (16, 64, 256, 3, 4, True),
        (16, 128, 64, 6, 4, True),
        (16, 128, 128, 4, 4, True),
        (16, 64, 64, 10, 4, True),
        (16, 32, 512, 3, 4, True),
        (16, 16, 256, 6, 4, True),
        (32, 64, 128, 5, 4, True),
        (64, 64, 128, 4, 4, True),
        (64, 128, 64, 4, 8, True),
        (128, 128, 64, 4, 8, False),
        (16, 64, 128, 7, 4, True, True),
        (16, 128, 128, 3, 8, True, True),
        (32, 64, 128, 6, 4, True, True),
        (64, 64, 128, 5, 4, True, True),
        (128, 64, 64, 8, 4, True, True),
        (128, 128, 64, 4, 8, True, True),
    )
)
Key = tuple[int, int, int, int, torch.dtype]
AnyKey = TypeVar("AnyKey", bound=tuple[Any, ...])  # the first is the number of rows
AnyPick = TypeVar("AnyPick")


@dataclass(frozen=True, slots=True)
class Pick:
    """What computes one product; None: the library."""

    tiling: Tiling | None
    microseconds: float = 0.0  # 0: not timed


class Matmuls:
    """The products of one model."""

    def __init__(self, store: PickStore | None = None) -> None:
        self.picks: dict[Key, Pick] = {}
        self._close: dict[Key, list[Pick]] = {}  # nearly as fast as what was picked
        self._store = store
        torch.backends.cuda.preferred_blas_library("cublaslt")  # the one that can be kept from splitting sums
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._run(x, weight, _new(x, len(weight)), Epilogue.STORE)

    def in_float32(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product unrounded."""
        return self._run(x, weight, _new(x, len(weight), torch.float32), Epilogue.STORE)

    def add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """residual += x @ weight.T"""
        return self._run(x, weight, residual, Epilogue.ADD)

    def gated(self, x: Tensor, weight: Tensor) -> Tensor:
        """silu(gate) * up for a weight that holds the gate's rows, then up's."""
        return self._run(x, weight, _new(x, len(weight) // 2), Epilogue.SILU_GATED)

    def tune(self, weights: Sequence[Tensor], num_rows: Iterable[int], epilogue: Epilogue, dtype: torch.dtype) -> None:
        """Choose by time for matrices of one shape; several of them, so that none is timed from the cache."""
        for count in num_rows:
            x = _random_rows(count, weights[0])
            key = _key(x, weights[0], epilogue, dtype)
            if key not in self.picks:
                self.picks[key] = self._kept(
                    key, partial(self._fastest, key, x, weights[:TIMED_CALLS], epilogue, dtype)
                )
        if self._store is not None:
            self._store.save()

    def refine(self, num_rows: int, step_us: Callable[[], float]) -> None:
        """Choose by the time of whole steps among what is nearly as fast alone, for products of so many rows.

        A kernel's programs begin where those before it end, and how well they fit there no timing alone shows.
        """
        for key in refine_picks(self.picks, self._close, num_rows, step_us):
            self._keep(key, self.picks[key])
        if self._store is not None:
            self._store.save()

    def _run(self, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> Tensor:
        key = _key(x, weight, epilogue, out.dtype)
        pick = self.picks.get(key)
        if pick is None and torch.cuda.is_current_stream_capturing():
            pick = self._library_or_own(x, weight, epilogue, out.dtype)
        elif pick is None:
            pick = self.picks[key] = self._kept(key, partial(self._library_or_own, x, weight, epilogue, out.dtype))
            if self._store is not None:
                self._store.save(at_once=False)
        return _compute(pick, x, weight, out, epilogue)

    def _kept(self, key: Key, choose: Callable[[], Pick]) -> Pick:
        """The pick of an earlier process, or one that is made now."""
        pick = None if self._store is None else _restored(self._store.find(_name(key)), key)
        if pick is None:
            pick = choose()
            self._keep(key, pick)
        return pick

    def _keep(self, key: Key, pick: Pick) -> None:
        if self._store is not None:
            tiling = pick.tiling and list(astuple(pick.tiling))
            self._store.add(_name(key), [tiling, round(pick.microseconds, 2)])

    def _fastest(self, key: Key, x: Tensor, weights: Sequence[Tensor], epilogue: Epilogue, dtype: torch.dtype) -> Pick:
        best, *others = _by_time(x, weights, epilogue, dtype)
        self._close[key] = [one for one in others if one.microseconds <= CLOSE * best.microseconds][:MAX_CLOSE]
        return best

    def _library_or_own(self, x: Tensor, weight: Tensor, epilogue: Epilogue, dtype: torch.dtype) -> Pick:
        own = Pick(default_tiling(len(x), epilogue, x.element_size()))
        if len(x) <= FEW_ROWS or torch.cuda.is_current_stream_capturing():
            return own
        return Pick(None) if _is_equal(Pick(None), own, x, weight, epilogue, dtype) else own


def refine_picks(
    picks: dict[AnyKey, AnyPick], close: dict[AnyKey, list[AnyPick]], num_rows: int, step_us: Callable[[], float]
) -> list[AnyKey]:
    """Try what is nearly as fast within whole steps of so many rows; the products that were tried."""
    keys = [key for key in close if key[0] == num_rows and num_rows <= CLOSE_ROWS]
    best_us = step_us() if keys else 0.0
    for key in keys:
        for other in close.pop(key):
            held, picks[key] = picks[key], other
            found_us = step_us()
            if found_us < LEAST_GAIN * best_us:
                best_us = found_us
            else:
                picks[key] = held
    return keys


def _restored(stored: Stored | None, key: Key) -> Pick | None:
    """A stored pick, if it is one that could be made here."""
    match stored:
        case [None, int() | float() as microseconds]:
            is_tried = key[0] > FEW_ROWS and key[2] % LIBRARY_DEPTH == 0
            return Pick(None, microseconds) if is_tried else None
        case [[*fields], int() | float() as microseconds]:
            known = [one for one in (*CANDIDATES, *TILINGS) if list(astuple(one)) == fields]
            default = default_tiling(key[0], Epilogue(key[3]), torch.bfloat16.itemsize)
            known += [default] if list(astuple(default)) == fields else []
            return Pick(known[0], microseconds) if known else None
    return None


def _compute(pick: Pick, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> Tensor:
    if pick.tiling is not None:
        return multiply(x, weight, out, epilogue, pick.tiling)
    if epilogue is Epilogue.ADD:
        return out.addmm_(x, weight.T)
    if epilogue is Epilogue.SILU_GATED:
        return rows.activate(torch.mm(x, weight.T), "silu", gated=True)
    return torch.mm(x, weight.T) if out.dtype == x.dtype else torch.mm(x, weight.T, out_dtype=out.dtype)


def _by_time(x: Tensor, weights: Sequence[Tensor], epilogue: Epilogue, dtype: torch.dtype) -> list[Pick]:
    """All that give the same bits, the fastest first."""
    own = Pick(default_tiling(len(x), epilogue, x.element_size()))
    suited = [one for one in CANDIDATES if len(x) <= 4 * one.rows and one.rows <= max(16, 2 * len(x))]
    tilings = [one for one in suited if one.can_compute(weights[0], epilogue)]
    out = _new(x, len(weights[0]) // (2 if epilogue is Epilogue.SILU_GATED else 1), dtype)
    compile_products((x, weights[0], out, epilogue, one) for one in tilings)
    picks = [own, *map(Pick, tilings)] + ([Pick(None)] if len(x) > FEW_ROWS else [])
    equal = [pick for pick in picks if _is_equal(pick, own, x, weights[0], epilogue, dtype)]
    timed = [Pick(pick.tiling, _time_us(pick, x, weights, epilogue, dtype)) for pick in equal]
    return sorted(timed, key=lambda pick: pick.microseconds)


def _is_equal(pick: Pick, own: Pick, x: Tensor, weight: Tensor, epilogue: Epilogue, dtype: torch.dtype) -> bool:
    """Compare all bits on fixed random rows, with something there to be added to.

    Rounding hides most differences of the sums: millions of results are compared, whatever the matrix's size.
    """
    if pick.tiling is None and weight.shape[1] % LIBRARY_DEPTH:
        return False
    width = len(weight) // 2 if epilogue is Epilogue.SILU_GATED else len(weight)
    for trial in range(-(-NUM_COMPARED // (len(x) * width))):
        values = _random_rows(len(x), weight, trial)
        held = torch.randn(len(x), width, device=x.device, generator=_generator(x.device, trial)).to(dtype)
        found, wanted = (_compute(one, values, weight, held.clone(), epilogue) for one in (pick, own))
        if not torch.equal(found, wanted):
            return False
    return True


def _time_us(pick: Pick, x: Tensor, weights: Sequence[Tensor], epilogue: Epilogue, dtype: torch.dtype) -> float:
    """Time a graph of several calls, so that launching does not count."""
    width = len(weights[0]) // 2 if epilogue is Epilogue.SILU_GATED else len(weights[0])
    out = torch.zeros(len(x), width, device=x.device, dtype=dtype)

    def call() -> None:
        for i in range(TIMED_CALLS):
            _compute(pick, x, weights[i % len(weights)], out, epilogue)

    return replay_us(call) / TIMED_CALLS


def replay_us(call: Callable[[], object]) -> float:
    """Microseconds of one call, captured."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(TIMED_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / TIMED_REPLAYS


def _key(x: Tensor, weight: Tensor, epilogue: Epilogue, dtype: torch.dtype) -> Key:
    return len(x), weight.shape[0], weight.shape[1], int(epilogue), dtype


def _name(key: Key) -> str:
    *numbers, dtype = key
    return " ".join([*map(str, numbers), str(dtype).removeprefix("torch.")])


def _new(x: Tensor, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(len(x), columns, device=x.device, dtype=dtype or x.dtype)


def _random_rows(count: int, weight: Tensor, seed: int = 0) -> Tensor:
    found = torch.randn(count, weight.shape[1], device=weight.device, generator=_generator(weight.device, seed))
    return found.to(weight.dtype)


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
