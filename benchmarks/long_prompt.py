"""A prompt that fills a long context, with layers that keep their window only and with layers that keep all.

    python -m benchmarks.long_prompt MODEL.gguf [--tokens N] [--threads N] [--write NAME]

Native backend, each way in a process of its own: planned bytes of the cache, largest resident memory, processor time,
and whether the answers have the same bytes. Text is the repository's own documents, repeated. --write: to
benchmarks/results/windows-NAME.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from tests.results import write_result

import kvarn.engine.load
from kvarn import LLM, EngineConfig, SamplingParams

DOCUMENTS = Path(__file__).parent.parent / "docs"
ANSWER = 16
WAYS = ("freed", "kept")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=32_768 - ANSWER)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--write", metavar="NAME")
    args = parser.parse_args()
    if args.way is not None:
        print(json.dumps(run(args.model, args.tokens, args.threads, keeps_all=args.way == "kept")))
        return
    found = {way: _in_process(args, way) for way in WAYS}
    for way, one in found.items():
        sizes = f"cache {one['kv_mib']:7.1f} MiB   resident {one['rss_mib']:7.1f} MiB"
        print(f"{way:6} {sizes}   {one['cpu_s']:7.1f} s of CPU")
    same = found["freed"]["answer"] == found["kept"]["answer"]
    print(f"{args.tokens} tokens; the same bytes: {same}")
    figures = {"tokens": args.tokens, "same": same, **found}
    if args.write:
        command = f"python -m benchmarks.long_prompt {Path(args.model).name} --tokens {args.tokens}"
        write_result(f"windows-{args.write}", figures, command=command)
    print(json.dumps(figures))


def run(model: str, num_tokens: int, threads: int, *, keeps_all: bool) -> dict[str, object]:
    """One prompt and a short answer, with the log-probabilities of its tokens."""
    if keeps_all:
        kvarn.engine.load.window_step = lambda _config: None  # type: ignore[attr-defined]
    config = EngineConfig(threads=threads, context=num_tokens + ANSWER, prefill_ms=2000.0)
    with LLM(model, config=config) as llm:
        text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.glob("*.md")))
        ids = llm.tokenizer.encode(text)
        ids = (ids * (num_tokens // len(ids) + 1))[:num_tokens]
        begun = time.process_time()
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=2)
        completion = llm.generate(ids, params)
        stats = llm.stats()
        answer = repr((completion.token_ids, completion.logprobs)).encode()
        return {
            "kv_mib": llm.memory.kv_bytes / 2**20,
            "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "cpu_s": time.process_time() - begun,
            "window_blocks": stats.window_blocks_total,
            "token_ids": list(completion.token_ids),
            "answer": hashlib.sha256(answer).hexdigest(),
        }


def _in_process(args: argparse.Namespace, way: str) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmarks.long_prompt", args.model, "--way", way]
    command += ["--tokens", str(args.tokens), "--threads", str(args.threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
