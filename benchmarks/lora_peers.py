"""LoRA adapters of kvarn serve and of llama.cpp's server: tokens per CPU second on adapters and on the base.

    python -m benchmarks.lora_peers [--model qwen-coder] [--rank 8] [--users 8] [--server-python PYTHON]

Two servers with one thread each are asked over HTTP in turns, by one user and by several, each on an adapter of its own
(random pairs for all linear matrices, one GGUF file for both engines). CPU seconds of a server's processes. PYTHON has
xllamacpp. Prints a table and one line of JSON, last.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from tests.lora_files import write_gguf_adapter
from tests.results import write_result

from benchmarks.lora import MODELS, random_adapter
from benchmarks.serving import Server, running_server
from benchmarks.speculation_peers import cpu_s
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from kvarn.models.recurrent import attentions
from kvarn.models.spec import ModelSpec

CONTEXT = 1024
ARCHITECTURES = {"qwen-coder": "qwen2", "smollm2": "llama"}


def main() -> None:
    options = _options()
    model = MODELS[options.model]().resolve()
    with tempfile.TemporaryDirectory(prefix="kvarn-lora-") as folder, ExitStack() as stack:
        adapters = write_adapters(Path(folder), model, options)
        commands = _commands(model, adapters, options)
        servers = {name: stack.enter_context(running_server(command)) for name, command in commands.items()}
        figures: dict[str, Any] = {"model": model.name, "rank": options.rank, "rounds": options.rounds}
        figures["versions"] = {name: server.version for name, server in servers.items()}
        for users in sorted({1, options.users}):
            figures[f"users_{users}"] = measure(servers, users, options)
    if options.write:
        write_result(options.write, figures, command=f"python -m benchmarks.lora_peers {_told()}")
    print(json.dumps(figures))


def write_adapters(folder: Path, model: Path, options: argparse.Namespace) -> list[Path]:
    """One GGUF file for each user."""
    source = open_weights(model)
    spec: ModelSpec = describe(source).spec
    source.close()
    heads = next(iter(attentions(spec)))
    config = {"num_hidden_layers": len(spec.blocks), "num_attention_heads": heads.num_heads}
    config["num_key_value_heads"] = heads.num_kv_heads
    arch = ARCHITECTURES[options.model]
    return [
        write_gguf_adapter(folder / f"user{seed}.gguf", config, arch, random_adapter(spec, options.rank, seed), 16.0)
        for seed in range(options.users)
    ]


def measure(servers: dict[str, Server], users: int, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of rounds in turns, after one that fills caches."""
    rates: dict[tuple[str, bool], list[float]] = {(name, kind): [] for name in servers for kind in (False, True)}
    for turn in range(options.rounds + 1):
        for name, is_adapted in list(rates)[:: 1 if turn % 2 else -1]:
            before = cpu_s(servers[name].pid)
            num_tokens = sum(answers(name, servers[name].url, range(users), options.tokens, is_adapted=is_adapted))
            rates[name, is_adapted].append(num_tokens / (cpu_s(servers[name].pid) - before))
    found: dict[str, Any] = {}
    for name in servers:
        base, adapted = rates[name, False][1:], rates[name, True][1:]
        ratios = [b / a for a, b in zip(base, adapted, strict=True)]
        found[name] = {"base": round(median(base), 1), "adapters": round(median(adapted), 1)}
        found[name] |= {"ratio": round(median(ratios), 3), "ratios": [round(min(ratios), 3), round(max(ratios), 3)]}
        print(f"{users} users  {name:13}", found[name], flush=True)
    return found


def answers(name: str, url: str, users: Sequence[int], num_tokens: int, *, is_adapted: bool) -> list[int]:
    """Tokens of each user's answer, all at once."""
    base = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]

    def ask(user: int) -> int:
        body: dict[str, Any] = {"model": base, "prompt": f"def function_{user}(", "max_tokens": num_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        if name == "llama-server":  # it adds all it has where none is named
            body["lora"] = [{"id": user, "scale": float(is_adapted)}]
        elif is_adapted:
            body["model"] = f"user{user}"
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
        assert response.is_success, response.text
        found: int = response.json()["usage"]["completion_tokens"]
        return found

    with ThreadPoolExecutor(len(users)) as pool:
        return list(pool.map(ask, users))


def _commands(model: Path, adapters: list[Path], options: argparse.Namespace) -> dict[str, list[str]]:
    ours = [sys.executable, "-m", "kvarn.cli.main", "serve", "--port", "0", "--model", str(model), "--threads", "1"]
    ours += ["--context", str(CONTEXT), "--no-prefix-cache"]
    for path in adapters:
        ours += ["--lora", f"{path.stem}={path}"]
    theirs = [options.server_python, "-m", "benchmarks.engines.xllama_server", str(model), "1"]
    theirs += [str(options.users), str(CONTEXT * options.users), "--lora", *map(str, adapters)]
    return {"kvarn": ours, "llama-server": theirs}


def _told() -> str:
    words = list(sys.argv[1:])
    if "--server-python" in words:
        at = words.index("--server-python")
        del words[at : at + 2]
    return " ".join(words)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen-coder", choices=MODELS)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--server-python", default=sys.executable)
    parser.add_argument("--write", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
