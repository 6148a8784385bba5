"""`kvarn serve` on a GPU beside the engine alone: many streaming clients, nothing lost in a while, a lost GPU.

    python -m benchmarks.gpu_serving [--backend cuda] [--shape qwen3-0.6b] [--shape llama-3.1-8b] [--soak-s 120]
                                     [--only http] [--only soak] [--only lost] [--in-process] [--folder DIR] [--out F]

For each shape, random weights: `engine`: llm.generate of as many prompts of 128 tokens, 256 answered; `http`: the same
as streams from client processes, one connection each; `soak`: 64 clients for a while, memory before and after; `lost`:
an error in a kernel while 8 clients read. Rates are medians of the runs, with the best and all of them beside; with
those of `http` also when the first and the last client asked, had text and had all of it, and the CPU time of the event
loop, the server's process and the engine's. The last line is JSON. --shape tiny --backend torch tries it on a CPU.
Packages may lie in a folder on PYTHONPATH (pip install --target): every process that this starts finds what this one
has found.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stream_clients import child_pids, random_prompt, run_clients

CLIENT_PROCESSES = 8
SERVER_PACKAGES = ("fastapi", "uvicorn", "httptools", "typer", "tokenizers")
PARTS = ("http", "soak", "lost")
TINY = ("qwen3", 2, 64, 128, 2, 1, 4096, 4096, 1e6, 1e-6, "qwen2")
CONTEXT, BATCH_TOKENS = 2304, 8192
LONG_ANSWER = 2000  # tokens, while the GPU is lost


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs, and after how many seconds it said so."""

    pid: int
    port: int
    ready_s: float


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
    parser.add_argument("--folder", type=Path, help="where models lie already, by shape; others are written there")
    parser.add_argument("--out", type=Path)
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
            path = (given.folder or Path(folder)) / f"{shape}.gguf"
            found[shape] = _measure(given, path if path.exists() else _write(path, shape), pool)
            if given.out is not None:
                given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
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
    with _server(given, model) as server:
        found["ready_s"] = server.ready_s
        if "http" in given.only:
            found["http"] = _http_rates(given, pool, server, found["engine"], model.stem)
        if "soak" in given.only:
            found["soak"] = _soak(given, pool, server)
            print(model.stem, "soak:", found["soak"], flush=True)
        if "lost" in given.only:
            found["lost"] = _lose(given, server)
            print(model.stem, "lost:", found["lost"], flush=True)
    return found


def _http_rates(
    given: argparse.Namespace, pool: ProcessPoolExecutor, server: Server, engine: dict[str, Any], name: str
) -> dict[str, Any]:
    found = {}
    for clients in given.clients:
        runs = [_http_rate(given, pool, server, clients) for _ in range(given.runs + 1)][1:]
        rates, alone = [run.pop("tokens_per_s") for run in runs], engine[str(clients)]
        row = _figures(rates) | {"of_engine": round(statistics.median(rates) / alone["tokens_per_s"], 3)}
        row |= {"best_of_best": round(max(rates) / alone["best"], 3)}
        found[str(clients)] = row | {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
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
def _server(given: argparse.Namespace, model: Path) -> Iterator[Server]:
    started = time.perf_counter()
    command, log = _self(given, "--serve", model), model.with_suffix(".log").open("w+")
    with log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "http://" in line), None)
            if line is None:
                log.seek(0)
                sys.exit(f"the server ended with {process.wait()}:\n{log.read()[-2000:]}")
            ready_s = round(time.perf_counter() - started, 1)
            print(f"ready after {ready_s} s: {line.strip()}", flush=True)
            yield Server(process.pid, int(line.rstrip().rstrip("/").rpartition(":")[2]), ready_s)
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


def _http_rate(given: argparse.Namespace, pool: ProcessPoolExecutor, server: Server, clients: int) -> dict[str, float]:
    """So many clients at once: tokens per second from the first that connects to the last that has its answer."""
    before, found, after = _cpu_seconds(server.pid), _ask(given, pool, server.port, clients), _cpu_seconds(server.pid)
    answers, num_tokens = found["answers"], clients * given.answer
    if sum(one.num_tokens for one in answers) != num_tokens:
        sys.exit(
            f"not {clients} x {given.answer} tokens came, {len(found['failures'])} failed: {found['failures'][:1]}"
        )
    started = min(one.asked_at for one in answers)
    took_s = max(one.ended_at for one in answers) - started
    told = {"tokens_per_s": round(num_tokens / took_s, 1)}
    told["events_per_token"] = sum(one.num_events for one in answers) / num_tokens
    for name in ("asked_at", "began_at", "ended_at"):
        times = [getattr(one, name) - started for one in answers]
        told |= {f"first_{name}": min(times), f"last_{name}": max(times)}
    return told | {f"{name}_cpu_s": after[name] - before[name] for name in before}


def _cpu_seconds(pid: int) -> dict[str, float]:
    """Of the server's event loop, of its process, and of the engine's."""
    found = {"loop": _cpu_time(f"{pid}/task/{pid}"), "server": _cpu_time(str(pid))}
    return found | {"engine": sum(_cpu_time(str(child)) for child in child_pids(pid))}


def _cpu_time(name: str) -> float:
    user, system = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _ask(given: argparse.Namespace, pool: ProcessPoolExecutor, port: int, clients: int, soak_s: float = 0) -> Any:
    """Every answer, and how the others ended."""
    shares = [range(first, clients, CLIENT_PROCESSES) for first in range(min(CLIENT_PROCESSES, clients))]
    jobs = [pool.submit(run_clients, port, one, given.prompt, given.answer, soak_s) for one in shares]
    found = [answer for job in jobs for answer in job.result()]
    return {
        "answers": [one for one in found if not isinstance(one, str)],
        "failures": [one for one in found if isinstance(one, str)],
    }


def _soak(given: argparse.Namespace, pool: ProcessPoolExecutor, server: Server) -> dict[str, Any]:
    before = _memory(given, server.pid)
    found = _ask(given, pool, server.port, given.clients[0], given.soak_s)
    after = _memory(given, server.pid)
    ended = {"answers": len(found["answers"]), "failed": len(found["failures"]), "example": found["failures"][:1]}
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


def _lose(given: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Clients that read while the GPU fails get an error, and the server says that it is not ready."""
    with ProcessPoolExecutor(1) as pool:
        job = pool.submit(run_clients, server.port, range(8), given.prompt, LONG_ANSWER)
        time.sleep(1)
        for pid in (server.pid, *child_pids(server.pid)):
            os.kill(pid, signal.SIGUSR1)
        answers = job.result()
    failures, lost = [one for one in answers if isinstance(one, str)], time.monotonic()
    while (ready := _status(server.port)) == "200" and time.monotonic() < lost + 30:
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
