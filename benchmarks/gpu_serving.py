"""`kvarn serve` on a GPU beside the engine alone: many streaming clients, nothing lost in a while, a lost GPU.

    python -m benchmarks.gpu_serving [--backend cuda] [--shape qwen3-0.6b] [--shape llama-3.1-8b] [--soak-s 120]
                                     [--only http] [--only soak] [--only lost] [--in-process]

For each shape, random weights: `engine`: llm.generate of as many prompts of 128 tokens, 256 answered; `http`: the same
as streams from client processes, one connection each; `soak`: 64 clients for a while, memory before and after; `lost`:
an error in a kernel while 8 clients read. Rates are medians of the runs, with the best and all of them beside. The last
line is JSON. --shape tiny --backend torch tries it on a CPU. Packages may lie in a folder on PYTHONPATH (pip install
--target): every process that this starts finds what this one has found.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.stream_clients import child_pids, random_prompt, run_clients

CLIENT_PROCESSES = 8
SERVER_PACKAGES = ("fastapi", "uvicorn", "httptools", "typer", "tokenizers")
PARTS = ("http", "soak", "lost")
TINY = ("qwen3", 2, 64, 128, 2, 1, 4096, 4096, 1e6, 1e-6, "qwen2")
CONTEXT, BATCH_TOKENS = 2304, 8192
LONG_ANSWER = 2000  # tokens, while the GPU is lost


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--shape", action="append")
    parser.add_argument("--clients", type=int, action="append")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--soak-s", type=float, default=120.0)
    parser.add_argument("--only", choices=PARTS, action="append", help="of http (with the engine alone), soak and lost")
    parser.add_argument("--in-process", action="store_true", help="the engine on a thread of the server's process")
    parser.add_argument("--kv-bytes", type=int, default=40 << 30)
    parser.add_argument("--engine", metavar="MODEL", help=argparse.SUPPRESS)  # the engine alone, in a process
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)  # a server that SIGUSR1 takes the GPU from
    given = parser.parse_args()
    given.clients, given.only = given.clients or [64, 256], given.only or PARTS
    if given.engine:
        return print(json.dumps(_engine_alone(given)))
    if given.serve:
        return _serve(given)
    if missing := [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]:
        sys.exit(f"{', '.join(missing)} cannot be imported; put a folder of `pip install --target` on PYTHONPATH")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(CLIENT_PROCESSES) as pool:
        for shape in given.shape or ["qwen3-0.6b", "llama-3.1-8b"]:
            found[shape] = _measure(given, _write(Path(folder) / f"{shape}.gguf", shape), pool)
    print(json.dumps(found))
    return None


def _write(path: Path, shape: str) -> Path:
    from kvarn.bench.synthetic import ModelShape, write_model, write_shape

    if shape == "tiny":
        write_shape(path, ModelShape(*TINY, key_length=32, qk_norm=True), "BF16", "tiny")
    else:
        write_model(path, shape, "BF16")
    return path


def _measure(given: argparse.Namespace, model: Path, pool: ProcessPoolExecutor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "http" in given.only:
        alone = subprocess.run(_self(given, "--engine", model), stdout=subprocess.PIPE, text=True, check=True).stdout
        found["engine"] = json.loads(alone.splitlines()[-1])
    with _server(given, model) as (process, port):
        if "http" in given.only:
            found["http"] = _http_rates(given, pool, port, found["engine"], model.stem)
        if "soak" in given.only:
            found["soak"] = _soak(given, pool, port, process.pid)
            print(model.stem, "soak:", found["soak"], flush=True)
        if "lost" in given.only:
            found["lost"] = _lose(given, port, process)
            print(model.stem, "lost:", found["lost"], flush=True)
    return found


def _http_rates(
    given: argparse.Namespace, pool: ProcessPoolExecutor, port: int, engine: dict[str, Any], name: str
) -> dict[str, Any]:
    found = {}
    for clients in given.clients:
        rates = [_http_rate(given, pool, port, clients) for _ in range(given.runs + 1)][1:]
        alone = engine[str(clients)]
        row = _figures(rates) | {"of_engine": round(statistics.median(rates) / alone["tokens_per_s"], 3)}
        found[str(clients)] = row | {"best_of_best": round(max(rates) / alone["best"], 3)}
        print(name, clients, "clients:", found[str(clients)], "engine:", alone, flush=True)
    return found


def _figures(rates: list[float]) -> dict[str, Any]:
    return {"tokens_per_s": round(statistics.median(rates), 1), "best": max(rates), "all": rates}


def _self(given: argparse.Namespace, mode: str, model: Path) -> list[str]:
    numbers = [f"--{name}={getattr(given, name)}" for name in ("backend", "prompt", "answer", "runs")]
    clients = [f"--clients={count}" for count in given.clients]
    others = [f"--kv-bytes={given.kv_bytes}", *(["--in-process"] if given.in_process else [])]
    return [sys.executable, "-m", "benchmarks.gpu_serving", *numbers, *clients, *others, mode, str(model)]


def _engine_alone(given: argparse.Namespace) -> dict[str, Any]:
    import kvarn

    config = kvarn.EngineConfig(
        backend=given.backend, context=CONTEXT, kv_bytes=given.kv_bytes, max_batch_tokens=BATCH_TOKENS, max_running=256
    )
    params = kvarn.SamplingParams(max_tokens=given.answer, temperature=0.0, ignore_eos=True)
    found = {}
    with kvarn.LLM(given.engine, config=config) as llm:
        for clients in given.clients:
            rates = []
            for run in range(given.runs + 1):
                prompts = [random_prompt(given.prompt, (run, i)) for i in range(clients)]
                started = time.perf_counter()
                llm.generate(prompts, params)
                rates.append(round(clients * given.answer / (time.perf_counter() - started), 1))
            found[str(clients)] = _figures(rates[1:])
    return found


@contextmanager
def _server(given: argparse.Namespace, model: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    started = time.perf_counter()
    command, log = _self(given, "--serve", model), model.with_suffix(".log").open("w+")
    with log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "http://" in line), None)
            if line is None:
                log.seek(0)
                sys.exit(f"the server ended with {process.wait()}:\n{log.read()[-2000:]}")
            print(f"ready after {time.perf_counter() - started:.1f} s: {line.strip()}", flush=True)
            yield process, int(line.rstrip().rstrip("/").rpartition(":")[2])
        finally:
            process.kill()


def _serve(given: argparse.Namespace) -> None:
    """`kvarn serve` in this process, whose next step after a SIGUSR1 makes the GPU fail."""
    import kvarn.engine.process.child
    from benchmarks.failing_host import fail_on_signal
    from kvarn.cli.main import main as kvarn_main

    fail_on_signal()
    kvarn.engine.process.child.HOST = "benchmarks.failing_host"
    settings = Path(given.serve).with_suffix(".toml")
    settings.write_text(
        f'models = ["{given.serve}"]\nport = 0\nlog_level = "error"\nqueue_limit = 1024\n[engine]\n'
        f'backend = "{given.backend}"\ncontext = {CONTEXT}\nkv_bytes = {given.kv_bytes}\n'
        f"max_batch_tokens = {BATCH_TOKENS}\nmax_running = 256\n"
        + ("own_process = false\n" if given.in_process else "")
    )
    sys.argv = ["kvarn", "serve", "--config", str(settings)]
    kvarn_main()


def _http_rate(given: argparse.Namespace, pool: ProcessPoolExecutor, port: int, clients: int) -> float:
    """Tokens per second of so many clients that begin together, until the last of them has its answer."""
    started = time.perf_counter()
    found = _ask(given, pool, port, clients)
    took = time.perf_counter() - started
    if sum(found["tokens"]) != clients * given.answer:
        sys.exit(f"{sum(found['tokens'])} tokens came, not {clients} x {given.answer}: {found['failures'][:1]}")
    return round(clients * given.answer / took, 1)


def _ask(given: argparse.Namespace, pool: ProcessPoolExecutor, port: int, clients: int, soak_s: float = 0) -> Any:
    """Tokens of every answer, and how the others ended."""
    shares = [range(first, clients, CLIENT_PROCESSES) for first in range(min(CLIENT_PROCESSES, clients))]
    jobs = [pool.submit(run_clients, port, one, given.prompt, given.answer, soak_s) for one in shares]
    found = [answer for job in jobs for answer in job.result()]
    return {
        "tokens": [one.num_tokens for one in found if not isinstance(one, str)],
        "failures": [one for one in found if isinstance(one, str)],
    }


def _soak(given: argparse.Namespace, pool: ProcessPoolExecutor, port: int, pid: int) -> dict[str, Any]:
    before = _memory(given, pid)
    found = _ask(given, pool, port, given.clients[0], given.soak_s)
    after = _memory(given, pid)
    ended = {"answers": len(found["tokens"]), "failed": len(found["failures"]), "example": found["failures"][:1]}
    return ended | {f"{name}_mb": [before[name], after[name]] for name in before}


def _memory(given: argparse.Namespace, pid: int) -> dict[str, int]:
    """MB of the server's processes and of the GPU."""
    found = {"rss": sum(_rss_kib(one) for one in (pid, *child_pids(pid))) >> 10}
    if given.backend == "cuda":
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        found["gpu"] = int(subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[0])
    return found


def _rss_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])


def _lose(given: argparse.Namespace, port: int, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Clients that read while the GPU fails get an error, and the server says that it is not ready."""
    with ProcessPoolExecutor(1) as pool:
        job = pool.submit(run_clients, port, range(8), given.prompt, LONG_ANSWER)
        time.sleep(1)
        for pid in (process.pid, *child_pids(process.pid)):
            os.kill(pid, signal.SIGUSR1)
        answers = job.result()
    failures, lost = [one for one in answers if isinstance(one, str)], time.monotonic()
    while (ready := _status(port)) == "200" and time.monotonic() < lost + 30:
        time.sleep(0.1)
    after_s = round(time.monotonic() - lost, 1)
    return {"failed": f"{len(failures)} of 8", "example": failures[:1], "ready": ready, "after_s": after_s}


def _status(port: int) -> str:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=10) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except OSError as error:
        return f"no answer: {error}"


if __name__ == "__main__":
    main()
