"""`python -m tests.server.load_engine PATH KV_BYTES THREADS`: the engine alone under the load of a server's clients.

Every line of stdin is a kvarn.bench.serve.Load as JSON: the same prompts through the same chat template, the same
answers, so many in flight for so long, then to the end of those. Prints one line of JSON for each. THREADS 0: as usual.
"""

from __future__ import annotations

import json
import math
import sys
import time
from queue import SimpleQueue

from kvarn import LLM, SamplingParams, TokenEvent
from kvarn.bench.serve import Load, Prompts


def measure(llm: LLM, load: Load) -> dict[str, float]:
    """Keep load.concurrency requests in flight as long as the load goes; tokens per second to the end of the last."""
    max_s, max_requests = load.seconds or math.inf, load.num_requests or math.inf
    prompts, ended = Prompts(load), SimpleQueue[TokenEvent]()
    params = SamplingParams(temperature=0.7, seed=load.seed, max_tokens=load.max_tokens, ignore_eos=load.ignores_end)

    def listen(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            ended.put(event)

    started, cpu_s, number, num_running, num_tokens = time.perf_counter(), time.process_time(), 0, 0, 0
    while True:
        while num_running < load.concurrency and number < max_requests and time.perf_counter() - started < max_s:
            llm.submit([{"role": "user", "content": prompts.make(number)}], params, on_token=listen)
            number, num_running = number + 1, num_running + 1
        if num_running == 0:
            break
        completion = ended.get().completion
        assert completion is not None
        num_running, num_tokens = num_running - 1, num_tokens + completion.usage.completion_tokens
    seconds = time.perf_counter() - started
    cpu_s = time.process_time() - cpu_s
    return {"requests": number, "tokens_per_s": num_tokens / seconds, "cpu_s_per_token": cpu_s / num_tokens}


def main() -> None:
    path, kv_bytes, threads = sys.argv[1:]
    with LLM(path, kv_bytes=int(kv_bytes), threads=int(threads) or None) as llm:
        for load in sys.stdin:
            print(json.dumps(measure(llm, Load(**json.loads(load)))), flush=True)


if __name__ == "__main__":
    main()
