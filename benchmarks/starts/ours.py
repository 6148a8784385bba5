"""Kvarn from nothing: `first` with the first token, `done` after an answer, then waits to be measured.

python ours.py MODEL THREADS ANSWER PROMPT_ID ...
"""

import sys

import kvarn
from kvarn import LLM, SamplingParams

threads, answer, *prompt = map(int, sys.argv[2:])
llm = LLM(sys.argv[1], threads=threads)
events = llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True))
next(events)
print("first", flush=True)
for _ in events:
    pass
print(f"done kvarn {kvarn.__version__}", flush=True)
sys.stdin.readline()
