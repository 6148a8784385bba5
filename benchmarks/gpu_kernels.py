"""The CUDA kernels on a GPU: right against float64, the same bits for every tiling and company, and how fast.

    python -m benchmarks.gpu_kernels [--out FILE.json]

Needs torch with CUDA and Triton. Prints one line per check and one JSON object, last; exits 1 when a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvarn.backends.batch import Batch
from kvarn.backends.torch.cuda import attention as paged
from kvarn.backends.torch.cuda import matmul as mm
from kvarn.backends.torch.cuda import rows as rowwise
from kvarn.backends.torch.cuda.choose import CANDIDATES, Matmuls
from kvarn.backends.torch.cuda.greedy import most_probable
from kvarn.backends.torch.cuda.matmul import Epilogue, Tiling
from kvarn.backends.torch.rope import RopeTable
from kvarn.backends.torch.step import Step, make_paged_tiles
from kvarn.backends.torch.weights import BlockWeights, Linear, NormWeights
from kvarn.models.spec import Attention, Block, FeedForward, Norm, Rope

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the CPU: with TRITON_INTERPRET=1
BF16 = torch.bfloat16
RESULTS: dict[str, Any] = {"checks": {}, "times": {}}


def check(name: str, is_right: bool, detail: str = "") -> None:
    RESULTS["checks"][name] = bool(is_right)
    print(f"{'ok  ' if is_right else 'FAIL'} {name} {detail}", flush=True)


def time_us(function: Callable[[], Any], repeats: int = 20) -> float:
    """Median microseconds of one call inside a captured graph of ten."""
    function()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            function()
    found = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 100)
    return sorted(found)[len(found) // 2]


class Case:
    """Random sequences over a paged cache, and the kernels' view of them."""

    def __init__(self, attention: Attention, spans: list[tuple[int, int]], block: int = 64, dtype: torch.dtype = BF16):
        """spans: (rows of this step, context slots) of each sequence."""
        self.attention, self.spans, self.block = attention, spans, block
        generator = torch.Generator(DEVICE).manual_seed(1)
        blocks = [-(-context // block) for _, context in spans]
        total = sum(blocks) + 1
        shape = (total, attention.num_kv_heads, block, attention.head_dim)
        self.k, self.v = (torch.randn(shape, device=DEVICE, generator=generator).to(dtype) for _ in range(2))
        ids = np.random.default_rng(2).permutation(total - 1).astype(np.int32) + 1
        self.tables = np.full((len(spans), max(blocks)), -1, np.int32)
        at = 0
        for i, count in enumerate(blocks):
            self.tables[i, :count] = ids[at : at + count]
            at += count
        self.starts = np.concatenate([[0], np.cumsum([rows for rows, _ in spans])])
        shape = (int(self.starts[-1]), attention.num_heads, attention.head_dim)
        self.q = torch.randn(shape, device=DEVICE, generator=generator).to(dtype)
        self.sinks = torch.randn(shape[1], device=DEVICE, generator=generator) if attention.sinks else None
        self.launch: paged.Launch | None = None

    def free(self) -> None:
        """Forget the blocks before the tile in which each sequence's first window begins; nothing may read block 0."""
        assert self.attention.window is not None, "only windows are freed"
        self.k[0] = self.v[0] = float("nan")
        for i, (num, context) in enumerate(self.spans):
            begin = max(context - num + 1 - self.attention.window, 0) // paged.KEY_TILE * paged.KEY_TILE
            self.tables[i, : begin // self.block] = -1

    def spoil(self) -> None:
        """What nobody wrote behind each sequence is no number."""
        for table, (_, context) in zip(self.tables, self.spans, strict=True):
            if context % self.block:
                for cache in (self.k, self.v):
                    cache[table[context // self.block], :, context % self.block :] = float("nan")

    def run(self, tile: int, split: bool = False, only: int | None = None, skip: int = 0) -> Tensor:
        """All sequences, or one of them without its first `skip` queries."""
        chosen = range(len(self.spans)) if only is None else [only]
        spans = [(self.spans[i][0] - skip, self.spans[i][1]) for i in chosen]
        rows = np.concatenate([np.arange(self.starts[i] + skip, self.starts[i + 1]) for i in chosen])
        positions = np.concatenate([np.arange(context - num, context) for num, context in spans]).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum([num for num, _ in spans])]).astype(np.int32)
        contexts = np.array([context for _, context in spans], np.int32)
        batch = Batch(positions, positions, starts, contexts, self.tables[list(chosen)], positions)
        num_key_tiles = -(-int(contexts.max()) // paged.KEY_TILE)
        tiles = make_paged_tiles(batch, tile, num_key_tiles, DEVICE)
        if all(num == 1 for num, _ in spans):
            moved = {"contexts": contexts, "tables": np.maximum(self.tables[list(chosen)], 0)}
            moved = {name: torch.from_numpy(one).to(DEVICE) for name, one in moved.items()}
            tiles = replace(tiles, is_decode=True, **moved)
        kernel = paged.Kernel(self.attention, tile, self.block)
        finished = torch.zeros(len(tiles.sequences) * self.attention.num_kv_heads, dtype=torch.int32, device=DEVICE)
        parts = paged.new_parts(len(tiles.sequences), kernel, num_key_tiles, finished) if split else None
        on_device = torch.from_numpy(positions).to(DEVICE)
        q, cache = self.q[rows], (self.k, self.v)
        self.call = lambda: paged.attend(q, cache, self.sinks, tiles, on_device, kernel, parts, self.launch)
        return self.call()

    def exact(self) -> torch.Tensor:
        a = self.attention
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=DEVICE)
        for i, (num, context) in enumerate(self.spans):
            blocks = np.maximum(self.tables[i], 0)
            k, v = (x[blocks].transpose(1, 2).flatten(0, 1)[:context].double() for x in (self.k, self.v))
            q = self.q[self.starts[i] : self.starts[i + 1]].double()
            group = a.num_heads // a.num_kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * a.scale
            if a.softcap:
                scores = a.softcap * torch.tanh(scores / a.softcap)
            queries = torch.arange(context - num, context, device=DEVICE)[:, None]
            keys = torch.arange(context, device=DEVICE)[None]
            seen = torch.ones(num, context, dtype=torch.bool, device=DEVICE)
            if a.mask == "causal":
                seen = keys <= queries
            if a.mask == "block_causal":
                seen = keys < (queries // a.mask_block + 1) * a.mask_block
            if a.window:
                seen = seen & (keys > queries - a.window)
            scores = scores.masked_fill(~seen, float("-inf"))
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(-1, num, 1)], -1)
            p = scores.softmax(-1)[..., :context]
            out[self.starts[i] : self.starts[i + 1]] = torch.einsum("hqk,khd->qhd", p, v)
        return out


def attention_of(heads: int, kv_heads: int, dim: int, **options: Any) -> Attention:
    return Attention(heads, kv_heads, dim, dim**-0.5, None, **options)


def check_attention() -> None:
    spans = [(1, 1), (1, 65), (1, 700), (7, 7), (130, 130), (64, 700), (33, 1500), (300, 555)]
    cases = {
        "llama": attention_of(32, 8, 128),
        "qwen2 group 7": attention_of(14, 2, 64),
        "smollm group 3": attention_of(9, 3, 64),
        "mha 96": attention_of(8, 8, 96),
        "group 4 of 64": attention_of(16, 4, 64),
        "gemma 256 cap": attention_of(8, 4, 256, softcap=50.0),
        "window": attention_of(8, 4, 64, window=100),
        "bidirectional": attention_of(32, 32, 128, mask="bidirectional"),
        "block": attention_of(16, 8, 128, mask="block_causal", mask_block=32),
        "odd dim 40": attention_of(6, 2, 40),
        "sinks": attention_of(8, 2, 64, sinks=True),
    }
    for name, attention in cases.items():
        for dtype in (BF16, torch.float32) if name == "window" else (BF16,):
            case = Case(attention, spans, 16 if name == "window" else 64, dtype)
            many = max(1, 64 * attention.num_kv_heads // attention.num_heads)
            got, want = case.run(many), case.exact()
            error = (got.double() - want).abs().max().item()
            label = f"attention {name} {str(dtype).removeprefix('torch.')}"
            check(label, error < (0.03 if dtype == BF16 else 2e-5), f"max error {error:.2e}")
            check(f"{label} tiles", torch.equal(got, case.run(1)), "of one query")
            check(f"{label} split", torch.equal(got, case.run(1, split=True)), "")
            check(f"{label} split, many queries", torch.equal(got, case.run(many, split=True)), "")
            if paged.Kernel(attention, 2 * many, case.block).is_large:
                case.spoil()
                check(f"{label} large prompts", torch.equal(got, case.run(2 * many)), "no numbers behind sequences")
            same = [torch.equal(case.run(1, only=i, skip=skip), got[case.starts[i] + skip : case.starts[i + 1]])
                    for i, (num, _) in enumerate(spans) for skip in (0, num // 2, num - 1)]  # fmt: skip
            check(f"{label} alone and chunked", all(same), f"{sum(same)} of {len(same)}")
            if attention.window is not None:
                case.free()
                freed = [case.run(size, split=split) for size in (1, many) for split in (False, True)]
                freed.append(torch.cat([case.run(1, only=i) for i in range(len(spans))]))
                check(f"{label} freed", all(torch.equal(one, got) for one in freed), "blocks before the window")


def check_norms() -> None:
    for width, rows in ((4096, 37), (1024, 5), (576, 3), (896, 1)):
        x = torch.randn(rows, width, device=DEVICE).to(BF16)
        w, b = (torch.randn(width, device=DEVICE).to(BF16) for _ in range(2))
        d = x.double()
        want = d * (d.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w.double()
        got = rowwise.normalise(x, NormWeights(Norm("rms", 1e-5), w, None))
        check(f"rms norm {width}", torch.allclose(got.double(), want, 1e-2, 1e-2))
        layer = NormWeights(Norm("layer", 1e-12, has_bias=True), w, b)
        want = torch.nn.functional.layer_norm(d, (width,), w.double(), b.double(), 1e-12)
        check(f"layer norm {width}", torch.allclose(rowwise.normalise(x, layer).double(), want, 1e-2, 2e-2))
    for act, function in (("silu", torch.nn.functional.silu), ("gelu", torch.nn.functional.gelu)):
        x = torch.randn(9, 2 * 3000, device=DEVICE).to(BF16)
        want = function(x[:, :3000].double()) * x[:, 3000:].double()
        check(f"activate {act}", torch.allclose(rowwise.activate(x, act, gated=True).double(), want, 1e-2, 1e-2))


def check_rope() -> None:
    for style, pairs, dim, norm in (("half", 64, 128, True), ("interleaved", 32, 64, False), ("half", 12, 40, False)):
        rope = Rope(style, tuple(10000 ** (-i / pairs) for i in range(pairs)))  # type: ignore[arg-type]
        a = Attention(6, 2, dim, 1.0, rope, qk_norm=Norm("rms", 1e-6) if norm else None)
        rows = 11
        qkv = torch.randn(rows, 10 * dim, device=DEVICE).to(BF16)
        k, v = (torch.zeros(5, 2, 16, dim, device=DEVICE, dtype=BF16) for _ in range(2))
        angles = torch.arange(200, dtype=torch.float64)[:, None] * torch.tensor(
            rope.inverse_frequencies, dtype=torch.float64
        )
        weights = tuple(torch.rand(dim, device=DEVICE) for _ in range(2)) if norm else None
        norms = (NormWeights(a.qk_norm, one, None) for one in weights) if weights and a.qk_norm else (None, None)
        block = BlockWeights(
            0, Block(a, FeedForward(1, "silu"), Norm("rms", 1e-6)), Linear(k), Linear(k), *norms, None, {}
        )
        positions, slots = (torch.arange(first, first + rows, device=DEVICE) for first in (100, 20))
        step = Step(None, rows, positions, positions, slots, None, None)
        q = rowwise.rotate_and_store(qkv, block, RopeTable(rope, DEVICE), step, (k, v))
        heads = qkv.double().view(rows, 10, dim)
        qk = heads[:, :8].clone()
        if weights:
            qk *= (qk.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
            qk[:, :6] *= weights[0].double()
            qk[:, 6:] *= weights[1].double()
        first, second = (
            (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
            if style == "interleaved"
            else (slice(0, pairs), slice(pairs, 2 * pairs))
        )
        cos, sin = (
            angles[100 : 100 + rows].cos()[:, None].to(DEVICE),
            angles[100 : 100 + rows].sin()[:, None].to(DEVICE),
        )
        want = qk.clone()
        want[..., first] = qk[..., first] * cos - qk[..., second] * sin
        want[..., second] = qk[..., first] * sin + qk[..., second] * cos
        stored_k, stored_v = (x.transpose(1, 2).flatten(0, 1)[20 : 20 + rows] for x in (k, v))
        good = torch.allclose(q.double(), want[:, :6], 1e-2, 2e-2) and torch.allclose(
            stored_k.double(), want[:, 6:], 1e-2, 2e-2
        )
        check(f"rope {style} {pairs} of {dim}", good and torch.equal(stored_v.double(), heads[:, 8:]))


def product(x: Tensor, w: Tensor, dtype: torch.dtype = BF16, tiling: Tiling | None = None) -> Tensor:
    return mm.multiply(x, w, torch.empty(len(x), len(w), device=DEVICE, dtype=dtype), Epilogue.STORE, tiling)


def check_matmul() -> None:
    for columns, depth in ((6144, 4096), (1024, 3072), (896, 576), (300, 200)):
        x = torch.randn(2048, depth, device=DEVICE).to(BF16)
        w = (torch.randn(columns, depth, device=DEVICE) * 0.02).to(BF16)
        want = product(x, w)
        exact = x.double() @ w.double().T
        error = ((want.double() - exact).abs() / (exact.abs() + 1)).max().item()
        check(f"matmul {columns}x{depth}", error < 0.01, f"max error {error:.1e}")
        bad = [t for t in CANDIDATES if not torch.equal(product(x, w, tiling=t), want)]
        check(f"matmul {columns}x{depth} tilings", not bad, str(bad))
        few = [rows for rows in (1, 2, 7, 16, 33, 100, 777) if not torch.equal(product(x[:rows], w), want[:rows])]
        check(f"matmul {columns}x{depth} rows", not few, str(few))
        matmuls = Matmuls()
        wide = product(x, w, torch.float32)
        residual = torch.randn(2048, columns, device=DEVICE).to(BF16)
        gated = matmuls.gated(x[:16], w)
        for rows in (1, 16, 40, 64, 512):
            y = x[:rows]
            check(f"matmul {columns}x{depth} chosen for {rows}", torch.equal(matmuls(y, w), want[:rows]))
            check(f"matmul {columns}x{depth} in float32 for {rows}", torch.equal(matmuls.in_float32(y, w), wide[:rows]))
            added = matmuls.add(residual[:rows].clone(), y, w)
            total = (residual[:rows].float() + want[:rows].float()).to(BF16)
            check(f"matmul {columns}x{depth} added for {rows}", torch.equal(added, total))
            same = min(rows, 16)
            check(f"matmul {columns}x{depth} gated for {rows}", torch.equal(matmuls.gated(y, w)[:same], gated[:same]))
    logits = torch.randn(5, 151936, device=DEVICE)
    logits[0, [7, 9000]] = 50.0
    logits[1, 3] = float("nan")
    logits[2, 5] = float("-inf")
    want = torch.argmax(logits, -1).int()
    want[0], want[1:3] = 7, -1
    check("most probable", torch.equal(most_probable(logits), want), str(most_probable(logits).tolist()))


def time_all() -> None:
    times = RESULTS["times"]
    llama = attention_of(32, 8, 128)
    for batch, context in ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024)):
        case = Case(llama, [(1, context)] * batch)
        case.run(1)
        whole = time_us(case.call)
        case.run(1, split=True)
        split = time_us(case.call)
        tbps = batch * context * 2 * 8 * 128 * 2 / min(whole, split) / 1e6
        times[f"decode attention {batch}x{context}"] = [round(whole, 1), round(split, 1), round(tbps, 2)]
        print(
            f"decode attention {batch}x{context}: whole {whole:.1f} us, split {split:.1f} us, {tbps:.2f} TB/s",
            flush=True,
        )
    case = Case(llama, [(2048, 2048)])
    case.run(16)
    took = time_us(case.call, 5)
    times["prefill attention 2048"] = round(took, 1)
    print(f"prefill attention 2048: {took:.1f} us", flush=True)
    for columns, depth in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)):
        weights = [(torch.randn(columns, depth, device=DEVICE) * 0.02).to(BF16) for _ in range(2)]
        matmuls = Matmuls()
        matmuls.tune(weights, (16, 32, 64, 128, 256), Epilogue.STORE, BF16)
        for (rows, *_), pick in matmuls.picks.items():
            tbps = columns * depth * 2 / pick.microseconds / 1e6
            times[f"matmul {rows} {columns}x{depth}"] = [str(pick.tiling), round(pick.microseconds, 1), round(tbps, 2)]
            print(f"matmul {rows:5} {columns}x{depth}: {pick.microseconds:.1f} us {tbps:.2f} TB/s {pick}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="")
    parser.add_argument("--no-times", action="store_true")
    args = parser.parse_args()
    begun = time.perf_counter()
    for part in [check_norms, check_rope, check_attention, check_matmul] + ([] if args.no_times else [time_all]):
        try:
            part()
        except Exception as error:
            import traceback

            traceback.print_exc()
            check(f"{part.__name__} ran", False, str(error)[:200])
        print(f"-- {part.__name__} after {time.perf_counter() - begun:.0f} s", flush=True)
    RESULTS["device"] = torch.cuda.get_device_name()
    print(json.dumps(RESULTS))
    if args.out:
        with open(args.out, "w") as file:
            json.dump(RESULTS, file)
    sys.exit(0 if all(RESULTS["checks"].values()) else 1)


if __name__ == "__main__":
    main()
