"""What a streamed token costs the server's processor, without a GPU: a backend that only takes a GPU's time.

    python -m benchmarks.http_streams [--clients 64] [--clients 256] [--answer 256] [--runs 3] [--low]

Its steps take 2 ms for up to 64 requests and 4 ms for more, and it runs ahead as CUDA does. For each number of clients:
CPU microseconds per token of the engine alone (llm.generate) and of `kvarn serve` with so many streams, the latter by
thread; events per token; and tokens/s beside the engine alone, which means little where clients share the cores.
--in-process: with the engine on a thread of the server's process; else it has one of its own, as on a GPU.
--low: one client alone, and 8 whose steps take 20 ms, where every token is to be an event. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_serving import TINY
from benchmarks.stream_clients import child_pids, random_prompt, run_clients
from kvarn.backends.batch import Batch, Sampled, SampleRows
from kvarn.backends.fake import FakeBackend

CLIENT_PROCESSES = 2
SHORT_STEP_MS, LONG_STEP_MS, SHORT_ROWS = 2.0, 4.0, 64
KV_BYTES, BATCH_TOKENS = 256 << 20, 8192


class TimedBackend(FakeBackend):
    """Chooses letters; a step is over so long after it was launched or the one before it was over."""

    name = "timed"

    def __init__(self, step_ms: float) -> None:
        super().__init__(vocab_size=TINY[6])
        self.runs_ahead = True
        self._step_ms = step_ms
        self._over_at = 0.0
        self._number = 0

    def forward(self, batch: Batch) -> Any:
        rows = len(batch.output_rows)
        step_s = 1e-3 * (self._step_ms or (SHORT_STEP_MS if rows <= SHORT_ROWS else LONG_STEP_MS))
        self._over_at = max(self._over_at, time.perf_counter()) + step_s
        return np.empty((rows, 0), np.float32)

    def sample_later(self, hidden: Any, rows: SampleRows) -> Callable[[], Sampled]:  # noqa: ARG002
        over_at, count = self._over_at, len(rows.rows)
        self._number += 1
        numbers = np.zeros(count, np.float32)
        token_ids = ((np.arange(count) * 7 + self._number) % 80 + 257).astype(np.int32)
        tops = np.zeros((count, rows.num_top), np.int32)

        def read() -> Sampled:
            time.sleep(max(0.0, over_at - time.perf_counter()))
            return Sampled(token_ids, numbers, numbers, tops, tops.astype(np.float32))

        return read

    def sample(self, hidden: Any, rows: SampleRows) -> Sampled:
        return self.sample_later(hidden, rows)()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, action="append")
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=0.0, help="of every step, instead of 2 and 4")
    parser.add_argument("--low", action="store_true")
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--engine", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.clients = given.clients or [64, 256]
    if given.engine:
        return print(json.dumps(_engine_alone(given)))
    if given.serve:
        return _serve(given)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(CLIENT_PROCESSES) as pool:
        model = _write(Path(folder))
        found = _low_load(given, model, pool) if given.low else _measure(given, model, pool)
    print(json.dumps(found))
    return None


def _write(folder: Path) -> Path:
    from kvarn.bench.synthetic import ModelShape, write_shape

    write_shape(folder / "tiny.gguf", ModelShape(*TINY, key_length=32, qk_norm=True), "BF16", "tiny")
    return folder / "tiny.gguf"


def _measure(given: argparse.Namespace, model: Path, pool: ProcessPoolExecutor) -> dict[str, Any]:
    alone = subprocess.run(_self(given, "--engine", model), stdout=subprocess.PIPE, text=True, check=True).stdout
    engine, found = json.loads(alone.splitlines()[-1]), {}
    with Server(given, model) as server:
        for clients in given.clients:
            runs = [_run(given, pool, server, clients) for _ in range(given.runs + 1)][1:]
            row = {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
            row["of_engine"] = round(row["tokens_per_s"] / engine[str(clients)]["tokens_per_s"], 3)
            found[str(clients)] = {"engine": engine[str(clients)], "http": row}
            print(clients, "clients:", found[str(clients)], flush=True)
    return found


def _low_load(given: argparse.Namespace, model: Path, pool: ProcessPoolExecutor) -> dict[str, Any]:
    found = {}
    for clients, step_ms in ((1, 2.0), (8, 20.0)):
        given.step_ms = step_ms
        with Server(given, model) as server:
            runs = [_run(given, pool, server, clients) for _ in range(given.runs)]
            found[f"{clients} x {step_ms:g} ms"] = runs[-1]
            print(clients, "clients, steps of", step_ms, "ms:", runs[-1], flush=True)
    return found


def _self(given: argparse.Namespace, mode: str, model: Path) -> list[str]:
    numbers = [f"--{name}={getattr(given, name)}" for name in ("prompt", "answer", "runs")]
    numbers += [f"--clients={count}" for count in given.clients]
    numbers += ["--in-process"] if given.in_process else []
    return [sys.executable, "-m", "benchmarks.http_streams", *numbers, f"--step-ms={given.step_ms}", mode, str(model)]


def use_timed_backend(step_ms: float) -> None:
    """Have every model loaded in this process computed by the backend that only takes time."""
    import kvarn.engine.load

    kvarn.engine.load.make_backend = lambda _config, _threads: TimedBackend(step_ms)  # type: ignore[assignment]


def _engine_alone(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    import kvarn

    use_timed_backend(given.step_ms)
    config = kvarn.EngineConfig(block_size=64, kv_bytes=KV_BYTES, max_batch_tokens=BATCH_TOKENS, max_running=256)
    params = kvarn.SamplingParams(max_tokens=given.answer, temperature=0.0, ignore_eos=True)
    found = {}
    with kvarn.LLM(given.engine, config=config) as llm:
        for clients in given.clients:
            rates, costs = [], []
            for run in range(given.runs + 1):
                prompts = [random_prompt(given.prompt, (run, i)) for i in range(clients)]
                started, cpu_s = time.perf_counter(), time.process_time()
                llm.generate(prompts, params)
                costs.append((time.process_time() - cpu_s) * 1e6 / (clients * given.answer))
                rates.append(clients * given.answer / (time.perf_counter() - started))
            middle = (statistics.median(values[1:]) for values in (rates, costs))
            found[str(clients)] = dict(zip(("tokens_per_s", "us"), (round(one, 2) for one in middle), strict=True))
    return found


def _serve(given: argparse.Namespace) -> None:
    """`kvarn serve` in this process, which tells the CPU time of its threads for every SIGUSR1."""
    import kvarn.engine.process.child
    from kvarn.cli.main import main as kvarn_main

    use_timed_backend(given.step_ms)
    kvarn.engine.process.child.HOST = "benchmarks.timed_host"
    os.environ["KVARN_BENCH_STEP_MS"] = str(given.step_ms)
    signal.signal(signal.SIGUSR1, lambda *_: print(json.dumps(_thread_times()), flush=True))
    settings = Path(given.serve).with_suffix(".toml")
    settings.write_text(
        f'models = ["{given.serve}"]\nport = 0\nlog_level = "error"\nqueue_limit = 1024\n'
        f"max_connections_per_address = 1024\n[engine]\nblock_size = 64\nkv_bytes = {KV_BYTES}\n"
        f"max_batch_tokens = {BATCH_TOKENS}\nmax_running = 256\nown_process = {str(not given.in_process).lower()}\n"
    )
    sys.argv = ["kvarn", "serve", "--config", str(settings)]
    kvarn_main()


def _thread_times() -> dict[str, float]:
    """CPU seconds: the engine's thread or process, the event loop on the main thread, and all together."""
    found = {"all": time.process_time()}
    for pid in child_pids(os.getpid()):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        found["engine"] = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        found["all"] += found["engine"]
    for thread in threading.enumerate():
        name = {"kvarn-engine": "engine", "MainThread": "loop"}.get(thread.name)
        if name is not None and thread.ident is not None:
            found[name] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


class Server:
    """`--serve` in a process of its own."""

    def __init__(self, given: argparse.Namespace, model: Path) -> None:
        self._process = subprocess.Popen(_self(given, "--serve", model), stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._lines = self._process.stdout
        line = next((line for line in self._lines if "http://" in line), None)
        if line is None:
            sys.exit(f"the server ended with {self._process.wait()}")
        self.port = int(line.rstrip().rstrip("/").rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self._process.pid

    def thread_times(self) -> dict[str, float]:
        self._process.send_signal(signal.SIGUSR1)
        line = next(line for line in self._lines if line.startswith('{"all"'))
        return dict(json.loads(line))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def _run(given: argparse.Namespace, pool: ProcessPoolExecutor, server: Server, clients: int) -> dict[str, float]:
    """All clients once: microseconds of the server for each token, and how many events brought one."""
    before, started = server.thread_times(), time.perf_counter()
    shares = [range(first, clients, CLIENT_PROCESSES) for first in range(min(CLIENT_PROCESSES, clients))]
    jobs = [pool.submit(run_clients, server.port, one, given.prompt, given.answer) for one in shares]
    answers = [answer for job in jobs for answer in job.result()]
    took_s, after = time.perf_counter() - started, server.thread_times()
    failed = [one for one in answers if isinstance(one, str)]
    num_tokens = sum(one.num_tokens for one in answers if not isinstance(one, str))
    if failed or num_tokens != clients * given.answer:
        sys.exit(f"{num_tokens} tokens came, not {clients} x {given.answer}: {failed[:1]}")
    num_events = sum(one.num_events for one in answers if not isinstance(one, str))
    spent = {f"us_{name}": round((after[name] - before[name]) * 1e6 / num_tokens, 2) for name in before}
    rate = {"tokens_per_s": round(num_tokens / took_s, 1), "events_per_token": round(num_events / num_tokens, 3)}
    return spent | rate


if __name__ == "__main__":
    main()
