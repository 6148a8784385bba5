"""llama.cpp through xllamacpp from nothing: `first` with the first token, `done` after an answer, then waits.

python llama.py MODEL THREADS ANSWER PROMPT_ID ...
"""

import sys

import xllamacpp

threads, answer, *prompt = map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_parallel, params.n_ctx = 1, len(prompt) + answer + 64
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.fit_params = params.kv_unified = False
params.warmup = False  # it would only delay the first token
params.verbosity = -1
server = xllamacpp.Server(params)
chunks: list[object] = []


def collect(chunk: object) -> bool:
    """Called with every token; true would end the answer."""
    if not chunks:
        print("first", flush=True)
    chunks.append(chunk)
    return False


request = {"prompt": prompt, "n_predict": answer, "temperature": 0, "ignore_eos": True, "stream": True}
server.handle_completions(request, collect)
print(f"done xllamacpp {xllamacpp.__version__}", flush=True)
sys.stdin.readline()
