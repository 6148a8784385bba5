"""Experts and recurrent layers on a GPU: right beside plain operations, the same bits in any company, and how fast.

    python -m benchmarks.gpu_experts [tiny] [experts] [delta] [model]

Needs neither pytest nor the native core. Weights are random; the last line is JSON; exits 1 when a check failed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import gpu_check
from kvarn.backends.batch import Batch, StateSlots
from kvarn.backends.torch.backend import TorchBackend
from kvarn.backends.torch.cuda import experts as grouped
from kvarn.backends.torch.cuda import recurrent
from kvarn.backends.torch.device import Device, choose_device
from kvarn.backends.torch.mixers.recurrent import RowOps, make_state_rows, recur
from kvarn.backends.torch.plain import PlainOps
from kvarn.backends.torch.weights import BlockWeights, DeltaNetWeights, ExpertWeights, Linear, NormWeights
from kvarn.formats.open import open_weights
from kvarn.formats.weights import TensorInfo, TensorType
from kvarn.models.describe import describe
from kvarn.models.recurrent import conv_channels, state_floats
from kvarn.models.spec import Block, FeedForward, MixtureOfExperts, Norm
from kvarn.models.state_layers import GatedDeltaNet

REPLAYS = 4
CUDA, BF16 = torch.device("cuda"), torch.bfloat16
RESULTS: dict[str, Any] = {}
FAILED: list[str] = []
# Width, layers of the timing, and the experts: those of Qwen3-30B-A3B and of Mixtral 8x7B.
SHAPES = {
    "qwen3-30b-a3b": (2048, 6, MixtureOfExperts(128, 8, 768, "silu", renormalise=True)),
    "mixtral-8x7b": (4096, 2, MixtureOfExperts(8, 2, 14336, "silu", renormalise=True)),
}
DELTA = GatedDeltaNet(16, 32, 128, 128, 4, Norm("rms", 1e-6))
MOE_MODEL = gpu_check.SHAPES["qwen3-0.6b"] | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip


def report(name: str, found: Any, is_right: bool = True) -> None:
    RESULTS[name] = found
    FAILED.extend([] if is_right else [name])
    print("ok  " if is_right else "FAIL", name, found, flush=True)


def time_us(calls: Sequence[Callable[[], Any]], captured: bool = True, repeats: int = 5) -> float:
    """Microseconds of one call: all of them in turn, so that none finds its weights in the cache."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            kept = [call() for call in calls]  # noqa: F841 - not the same memory for all
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(REPLAYS):
            graph.replay() if captured else [call() for call in calls]
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return sorted(found)[repeats // 2] * 1e6 / len(calls) / REPLAYS


def tiny() -> None:
    """Tiny models with experts or states: beside the CPU in f32, and against themselves in company and in chunks."""
    from tests.diffusion_models import DIFFUSION, tiny_diffusion
    from tests.recurrent_model import write_recurrent_model
    from tests.running import batch_of, layout_of
    from tests.tiny_models import ARCHITECTURES, tiny_model

    def make(name: str, at: Path) -> Path:
        if name == "recurrent":
            return write_recurrent_model(at / "model.gguf")
        return (tiny_model if name in ARCHITECTURES else tiny_diffusion)(name, at, "safetensors")

    rng, ids, other = np.random.default_rng(0), *np.random.default_rng(1).integers(3, 100, (2, 90)).tolist()
    for name in ("mixtral", "qwen3moe", "recurrent", *(one for one in DIFFUSION if "moe" in one)):
        tables = rng.permutation(40)[:16].reshape(2, 8).astype(np.int32)
        backends = []
        for device in (Device(torch.device("cpu"), torch.float32), choose_device("cuda")):
            with tempfile.TemporaryDirectory() as folder:
                description = describe(open_weights(make(name, Path(folder))))
                backends.append(TorchBackend(device, 8))
                backends[-1].load(description.spec, description.weights)
            layout = layout_of(description.spec, "f16")
            backends[-1].reserve_kv(layout, 40 * layout.block_bytes)
        cpu, gpu = backends
        whole, exact = (one.forward(batch_of([(ids, 0)], tables[:1])) for one in (gpu, cpu))
        distance = float((whole.float().cpu() - exact.float()).norm() / exact.float().norm())
        beside = gpu.forward(batch_of([(other, 0), (ids, 0)], tables[::-1]))[len(ids) :]
        row = {"distance": round(distance, 4), "captured": gpu._graphs is not None}
        row["company"] = torch.equal(beside, whole)
        for chunks in ([50, 40], [70] + [1] * 20) if name not in DIFFUSION else ():
            spans = [(ids[end - n : end], end - n) for n, end in zip(chunks, np.cumsum(chunks).tolist(), strict=True)]
            parts = [gpu.forward(batch_of([span], tables[:1])) for span in spans]
            row[f"chunks of {chunks[0]}"] = torch.equal(torch.cat(parts), whole)
        report(f"tiny/{name}", row, all(row[key] for key in row if key != "distance") and distance < 0.05)


def random_experts(width: int, moe: MixtureOfExperts) -> ExpertWeights:
    def new(*shape: int) -> Linear:
        return Linear(torch.randn(*shape, device=CUDA, dtype=BF16) * 0.02)

    count = moe.num_experts
    return ExpertWeights(new(count, width), new(count, 2 * moe.hidden, width), new(count, width, moe.hidden))


def expert_rows(x: Tensor, weights: ExpertWeights, num_rows: int) -> grouped.ExpertRows:
    slots = torch.where(torch.arange(len(x), device=CUDA) < num_rows, 0, -1)
    return grouped.ExpertRows(x, torch.mm(x, weights.router.weight.T, out_dtype=torch.float32), None, slots, num_rows)


def experts() -> None:
    for name, (width, num_layers, moe) in SHAPES.items():
        layers = [random_experts(width, moe) for _ in range(num_layers)]
        x = torch.randn(2048, width, device=CUDA, dtype=BF16)
        _check_experts(name, x[:300], layers[0], moe)
        for rows in (1, 8, 32, 256, 2048):
            padded = x[: max(16, rows)]
            given = [(expert_rows(padded, one, rows), one, moe) for one in layers]
            used = sum(int((grouped.route(*one).counts > 0).sum()) for one in given) / len(given)
            read = used * 3 * moe.hidden * width * 2
            row: dict[str, Any] = {"experts read": round(used, 1), "tile": grouped.tile_rows(len(padded), moe)}
            for tile in (None, 16, 32, 64, 128):
                calls = [partial(grouped.run_experts, *one, tile) for one in given]
                row[f"us, tile {tile}"] = round(time_us(calls), 1)
            row["us, not captured"] = round(time_us(calls, captured=False), 1)
            plain = [partial(PlainOps().experts, x[:rows], one, moe, None) for one in layers[:2]]  # type: ignore[arg-type]
            row["us, plain"] = round(time_us(plain, captured=False, repeats=1), 1)
            row["TB/s"] = round(read / row["us, tile None"] / 1e6, 2)
            row["TFLOP/s"] = round(rows * moe.num_active * 6 * moe.hidden * width / row["us, tile None"] / 1e6, 1)
            report(f"experts/{name}/{rows}", row)
        del layers, given, calls, plain


def _check_experts(name: str, x: Tensor, weights: ExpertWeights, moe: MixtureOfExperts) -> None:
    """Beside float32, and bits: every tile, and a few rows alone among padding."""
    whole = grouped.run_experts(expert_rows(x, weights, len(x)), weights, moe)
    wide = ExpertWeights(*(Linear(one.weight.float()) for one in (weights.router, weights.gate_up, weights.down)))
    wanted = PlainOps().experts(x.float(), wide, moe, None)
    distance = float((whole.float() - wanted).norm() / wanted.norm())
    report(f"experts/{name}/distance", round(distance, 5), distance < 0.01)
    for tile in grouped.TILINGS:
        found = grouped.run_experts(expert_rows(x, weights, len(x)), weights, moe, tile)
        report(f"experts/{name}/bits of tile {tile}", torch.equal(found, whole), torch.equal(found, whole))
    for first, count in ((0, 1), (7, 5), (40, 16), (100, 130)):
        part = torch.cat([x[first : first + count], x[:16]])
        found = grouped.run_experts(expert_rows(part, weights, count), weights, moe)[:count]
        is_same = torch.equal(found, whole[first : first + count])
        report(f"experts/{name}/bits of {count} alone", is_same, is_same)


def _batch(num_sequences: int, rows: int) -> Batch:
    starts, total = np.arange(num_sequences + 1, dtype=np.int32) * rows, np.zeros(num_sequences * rows, np.int32)
    slots, empty = np.arange(num_sequences, dtype=np.int32), np.empty(0, np.int32)
    states = StateSlots(2 * slots, 2 * slots + 1, empty, empty)
    return Batch(total, total, starts, starts[1:], np.zeros((num_sequences, 1), np.int32), total, states=states)


def delta() -> None:
    """A layer of Qwen3-Next's delta net behind its projections."""
    heads, values, channels = DELTA.num_value_heads, DELTA.num_value_heads * DELTA.value_dim, conv_channels(DELTA)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.randn(*shape, device=CUDA) * 0.3).to(dtype)

    parts = [Linear(new(n, 64, dtype=BF16)) for n in (channels, values, heads, heads)]
    norm = NormWeights(DELTA.norm, torch.ones(DELTA.value_dim, device=CUDA), None)
    weights = DeltaNetWeights(*parts[1:], new(channels, 4), new(heads), -new(heads).abs(), norm)
    block = Block(DELTA, FeedForward(1, "silu"), DELTA.norm)
    held = BlockWeights(0, block, parts[0], parts[0], None, None, None, {}, recurrent=weights)  # type: ignore[arg-type]
    ops = PlainOps(torch.nn.functional.linear)
    for sequences, rows in ((1, 1), (8, 1), (32, 1), (128, 1), (1, 64), (1, 2048), (8, 256)):
        states, batch = new(2 * sequences, state_floats(DELTA)), _batch(sequences, rows)
        x, at = new(sequences * rows, 64, dtype=BF16), make_state_rows(batch, sequences * rows, CUDA)
        given = recurrent.Projections(*(ops.linear(x, one) for one in (parts[0], *(parts[i] for i in (1, 3, 2)))))
        found = recurrent.delta_net(given, weights, DELTA, at, states)
        row = {"us": round(time_us([partial(recurrent.delta_net, given, weights, DELTA, at, states)] * 4), 1)}
        row["TB/s of states"] = round(sequences * state_floats(DELTA) * 8 / row["us"] / 1e6, 2)
        is_near = True
        if sequences * rows <= 64:
            started = time.perf_counter()
            wanted = recur(x, held, RowOps(ops.linear, ops.normalise), batch, states).float()
            torch.cuda.synchronize()
            row["us, plain"] = round(1e6 * (time.perf_counter() - started), 1)
            row["distance"] = round(float((found.float() - wanted).norm() / wanted.norm()), 5)
            is_near = row["distance"] < 0.01
        report(f"delta/{sequences}x{rows}", row, is_near)


class RandomExperts(gpu_check.RandomWeights):
    """The shapes of MOE_MODEL."""

    def __init__(self) -> None:
        super().__init__(MOE_MODEL, tied=True)
        width, (hidden, count) = 2048, (768, 128)
        shapes = {f"ffn_{part}_exps": (count, hidden, width) for part in ("gate", "up")}
        shapes |= {"ffn_down_exps": (count, width, hidden), "ffn_gate_inp": (count, width)}
        shapes |= {"attn_q_norm": (128,), "attn_k_norm": (128,)}  # type: ignore[dict-item]
        for i in range(MOE_MODEL["num_hidden_layers"]):
            for part in ("gate", "up", "down"):
                del self.tensors[f"blk.{i}.ffn_{part}.weight"]
            named = {f"blk.{i}.{name}.weight": shape for name, shape in shapes.items()}
            self.tensors |= {name: TensorInfo(name, TensorType.BF16, shape) for name, shape in named.items()}


def model() -> None:
    """Four layers of Qwen3-30B-A3B with its head, through captured steps."""
    started = time.perf_counter()
    backend, spec = gpu_check.load(choose_device("cuda"), RandomExperts(), 8200)
    report("load_s", round(time.perf_counter() - started, 1), backend._graphs is not None)
    gpu_check.same(RESULTS, "moe", backend, spec)
    report("same", RESULTS["same/moe"], all(all(pair) for pair in RESULTS["same/moe"].values()))
    gpu_check.bench(RESULTS, "moe", backend, spec, steps=32)


def main(wanted: Iterable[str]) -> None:
    parts = {"experts": experts, "delta": delta, "tiny": tiny, "model": model}
    for name in wanted or parts:
        begun = time.perf_counter()
        try:
            parts[name]()
        except Exception as error:
            import traceback

            traceback.print_exc()
            report(f"{name} ran", str(error)[:300], is_right=False)
        torch.cuda.empty_cache()
        print(f"-- {name} took {time.perf_counter() - begun:.0f} s", flush=True)
    print(json.dumps(RESULTS | {"failed": FAILED, "device": torch.cuda.get_device_name()}))
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
