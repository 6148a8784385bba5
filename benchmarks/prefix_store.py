"""The prefix cache on disk: `python -m benchmarks.prefix_store` prints a table and writes results/prefix-store.json.

Cold, warm and restored first tokens are of processes of their own, killed and started again, one kind after another in
turns, so that a loaded machine is loaded for all. CPU time beside the clock's: only that means much on such a machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from tests.assets import smollm2
from tests.results import write_result

from kvarn import LLM, EngineConfig, SamplingParams
from kvarn.engine.engine import Engine
from kvarn.engine.persistence.disk_prefixes import DiskPrefixes
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from kvarn.models.memory_plan import kv_token_bytes
from kvarn.prefix_store.folder import StoreFolder
from kvarn.prefix_store.maintenance import survey
from kvarn.prefix_store.pack import UInt8
from kvarn.prefix_store.store import BlockStore, BlockToStore

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
FLUSH_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="[default: SmolLM2]")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=100_000, help="of the folder that is opened")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model = str(options.model or smollm2())
    if options.child:
        print(json.dumps(child(options.model, options.tokens, *options.child)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    figures: dict[str, Any] = {"model": Path(options.model).name, "prompt_tokens": options.tokens}
    with tempfile.TemporaryDirectory(prefix="kvarn-prefixes-") as folder:
        figures |= restart(options.model, options.tokens, options.rounds, Path(folder) / "restart")
        figures |= writing(options.model, options.rounds, Path(folder) / "writing")
        figures |= evicted(options.model, options.tokens, options.rounds, Path(folder) / "evicted")
        figures |= opening(options.blocks, Path(folder) / "opening")
    for name, value in figures.items():
        print(f"{name:<32} {value}")
    print(json.dumps(figures))
    write_result("prefix-store", figures, command=f"python -m benchmarks.prefix_store {shlex.join(sys.argv[1:])}")


def restart(model: str, num_tokens: int, rounds: int, folder: Path) -> dict[str, Any]:
    """First tokens: cold, warm, and restored in a process that was started after another was killed."""
    filled = run_child(model, num_tokens, "fill", folder)
    found: dict[str, list[dict[str, Any]]] = {"cold": [], "restored": []}
    for _ in range(rounds):
        found["cold"].append(run_child(model, num_tokens, "cold", folder))
        found["restored"].append(run_child(model, num_tokens, "restored", folder))
    every = [filled, *found["cold"], *found["restored"]]
    assert len({one["text"] for one in every}) == 1, "the answers differ"
    restored_bytes, rate = filled["bytes"], read_rate(folder)
    figures: dict[str, Any] = {"restored_bytes": restored_bytes, "read_and_verify_mb_per_s": round(rate / 1e6)}
    for kind, runs in found.items():
        figures[f"{kind}_first_token_s"] = round(statistics.median(run["first_s"] for run in runs), 4)
        figures[f"{kind}_first_token_cpu_s"] = round(statistics.median(run["first_cpu_s"] for run in runs), 4)
    warm = [run for runs in found.values() for run in runs]
    figures["warm_first_token_s"] = round(statistics.median(run["warm_s"] for run in warm), 4)
    figures["warm_first_token_cpu_s"] = round(statistics.median(run["warm_cpu_s"] for run in warm), 4)
    figures["bar_s"] = round(figures["warm_first_token_s"] + restored_bytes / rate, 4)
    figures["restored_to_cold"] = round(figures["restored_first_token_s"] / figures["cold_first_token_s"], 4)
    figures["restored_to_cold_cpu"] = round(
        figures["restored_first_token_cpu_s"] / figures["cold_first_token_cpu_s"], 4
    )
    figures["restored_cached_tokens"] = found["restored"][0]["cached"]
    return figures


def run_child(model: str, num_tokens: int, kind: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.prefix_store", "--model", model, "--tokens", str(num_tokens)]
    done = subprocess.run([*command, "--child", kind, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(model: str, num_tokens: int, kind: str, folder: str) -> dict[str, Any]:
    """One process: the first answer, and one that finds its prefix in memory."""
    llm = LLM(model, config=EngineConfig(context=2 * num_tokens, prefix_cache_dir=None if kind == "cold" else folder))
    prompt = prompt_ids(llm, num_tokens)
    llm.generate("Hello", params=GREEDY)  # what only the first request pays
    first = ask(llm, prompt)
    warm = ask(llm, prompt)
    figures = {"text": first["text"], "cached": first["cached"], "first_s": first["s"], "first_cpu_s": first["cpu_s"]}
    figures |= {"warm_s": warm["s"], "warm_cpu_s": warm["cpu_s"]}
    if kind == "fill":
        disk = llm._model.engine.scheduler.prefix_reuse.disk
        assert disk is not None
        assert disk.flush(FLUSH_S)
        figures["bytes"] = llm.stats().disk.written_bytes
    return figures


def prompt_ids(llm: LLM, num_tokens: int) -> list[int]:
    """Text of no meaning but of ordinary tokens."""
    text = "".join(
        f"Item {number}: {number * 7 % 13} lazy dogs jump over the brown fox. " for number in range(num_tokens)
    )
    return llm.tokenizer.encode(text)[:num_tokens]


def ask(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    cpu, began = time.process_time(), time.perf_counter()
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    completion = stream.completion()
    return {"s": seconds, "cpu_s": cpu_s, "text": completion.text, "cached": completion.usage.cached_tokens}


def read_rate(folder: Path) -> float:
    """Bytes a second of blocks that are read and verified, alone."""
    began = time.perf_counter()
    (found,) = survey(folder, verify=True)
    assert not found.num_damaged
    return found.num_bytes / (time.perf_counter() - began)


def writing(model: str, rounds: int, folder: Path) -> dict[str, Any]:
    """What a writer with more to do than it may costs four decoding requests: tokens per second, and per CPU second."""
    llm = LLM(model, config=EngineConfig(context=4096, prefix_cache_dir=str(folder)))
    prompt = prompt_ids(llm, 3000)
    engine = llm._model.engine
    disk = engine.scheduler.prefix_reuse.disk
    assert disk is not None
    ask(llm, prompt)
    assert disk.flush(FLUSH_S)
    rates: dict[str, list[tuple[float, float]]] = {"quiet": [], "writing": []}
    copies = _timed_copies(disk)
    shares = []  # of one core: the writer's thread, and copies on the engine's
    for turn in range(4 * rounds):
        for kind, seen in list(rates.items())[:: 1 if turn % 2 else -1]:
            if kind == "writing":
                llm.client.call(lambda _: _write_again(disk, engine.kv.digests(prompt))).result()
            began, before = time.perf_counter(), (disk._parts[2].cpu_s, sum(copies))  # type: ignore[index]
            seen.append(decode_rates(llm))
            if kind == "writing":
                spent_s = disk._parts[2].cpu_s - before[0] + sum(copies) - before[1]  # type: ignore[index]
                shares.append(spent_s / (time.perf_counter() - began))
            assert disk.flush(FLUSH_S)
    llm.close()
    ratios = np.array(rates["writing"]) / np.array(rates["quiet"])  # of each turn: what disturbs mostly disturbs both
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75), axis=0).round(4)
    return {
        "decode_tokens_per_s": round(statistics.median(rate for rate, _ in rates["quiet"]), 1),
        "writing_turns": len(ratios),
        "writing_to_quiet": float(middle[0]),
        "writing_to_quiet_quartiles": [float(low[0]), float(high[0])],
        "writing_to_quiet_per_cpu": float(middle[1]),
        "writing_to_quiet_per_cpu_quartiles": [float(low[1]), float(high[1])],
        "writing_share_of_a_core": round(statistics.median(shares), 4),
    }


def _timed_copies(disk: DiskPrefixes) -> list[float]:
    """Seconds of each copy that the engine's thread makes for the writer, from now on."""
    export, seconds = disk._export, []

    def timed(digests: Sequence[bytes]) -> list[tuple[bytes, UInt8]]:
        began = time.thread_time()
        found = export(digests)
        seconds.append(time.thread_time() - began)
        return found

    disk._export = timed  # type: ignore[method-assign]
    return seconds


def _write_again(disk: DiskPrefixes, digests: list[bytes]) -> None:
    """Have all blocks of a chain written as if none was on disk."""
    assert disk._parts is not None
    store, _, writer = disk._parts
    for pack in list(store.folder.packs_below(store.folder.path)):
        store.folder.delete(pack)
    writer.offer(digests, "")


def decode_rates(llm: LLM) -> tuple[float, float]:
    """Tokens a second, by the clock and by CPU time, of four requests."""
    cpu, began = time.process_time(), time.perf_counter()
    found = llm.generate(
        [f"Story number {number}:" for number in range(4)], params=GREEDY.replace(max_tokens=256)
    )  # longer than the writer rests
    num_tokens = sum(one.usage.completion_tokens for one in found)
    return num_tokens / (time.perf_counter() - began), num_tokens / (time.process_time() - cpu)


def evicted(model: str, num_tokens: int, rounds: int, folder: Path) -> dict[str, Any]:
    """First tokens of a prefix that another drove out of memory: from the file cache, and from copies kept in RAM."""
    source = open_weights(Path(model))
    kv_bytes = (num_tokens + 128) * kv_token_bytes(describe(source).spec)
    source.close()
    llm = LLM(model, config=EngineConfig(context=num_tokens + 64, kv_bytes=kv_bytes, prefix_cache_dir=str(folder)))
    prompt, other = prompt_ids(llm, num_tokens), prompt_ids(llm, 2 * num_tokens)[num_tokens:]
    engine = llm._model.engine
    disk = engine.scheduler.prefix_reuse.disk
    assert disk is not None
    for _ in range(2):
        ask(llm, prompt)
    assert disk.flush(FLUSH_S)
    copies = [content for _, content in llm.client.call(lambda _: disk._export(engine.kv.digests(prompt))).result()]

    def copy_back(_: Engine) -> float:
        began = time.perf_counter()
        for block_id, content in enumerate(copies):
            disk.backend.write_block(block_id, content)
        return time.perf_counter() - began

    evicted_s, warm_s = list[float](), list[float]()
    for _ in range(rounds):
        ask(llm, other)
        time.sleep(0.1)  # until its blocks are free
        for seen in (evicted_s, warm_s):
            answer = ask(llm, prompt)
            assert answer["cached"] > 0.9 * num_tokens
            seen.append(answer["s"])
    copies_s = [llm.client.call(copy_back).result() for _ in range(rounds)]  # last: nothing may be asked after it
    llm.close()
    return {
        "evicted_first_token_s": round(statistics.median(evicted_s), 4),
        "evicted_from_ram_first_token_s": round(statistics.median(warm_s) + statistics.median(copies_s), 4),
    }


def opening(num_blocks: int, folder: Path) -> dict[str, Any]:
    """How long a folder of so many of the smallest blocks takes to open."""
    store = _small_store(folder)
    content = np.zeros(4096, np.uint8)
    digests = (blake2b(number.to_bytes(8, "little"), digest_size=32).digest() for number in range(num_blocks))
    blocks = [BlockToStore(digest, "", content) for digest in digests]
    for first in range(0, num_blocks, 4096):
        store.append(blocks[first : first + 4096])
    store.folder.close()
    began, cpu = time.perf_counter(), time.process_time()
    store = _small_store(folder)
    figures = {
        "opened_blocks": len(store),
        "open_s": round(time.perf_counter() - began, 4),
        "open_cpu_s": round(time.process_time() - cpu, 4),
    }
    store.folder.close()
    return figures


def _small_store(folder: Path) -> BlockStore:
    return BlockStore(StoreFolder(folder, 1 << 31), b"", 4096, {})


if __name__ == "__main__":
    main()
