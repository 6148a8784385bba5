"""OpenVINO GenAI from nothing: `first` with the first token, `done` after an answer, then waits to be measured.

python openvino_cb.py MODEL THREADS ANSWER PROMPT_ID ...
"""

import sys

import numpy as np
import openvino
import openvino_genai

threads, answer, *prompt = map(int, sys.argv[2:])
scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size = 0  # it grows as it is needed
pipeline = openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
config = openvino_genai.GenerationConfig()
config.max_new_tokens, config.ignore_eos, config.do_sample = answer, True, False
handle = pipeline.add_request(0, openvino.Tensor(np.array([prompt], np.int64)), config)
while not handle.can_read():
    pipeline.step()
print("first", flush=True)
while pipeline.has_non_finished_requests():
    pipeline.step()
print(f"done openvino-genai {openvino_genai.__version__}", flush=True)
sys.stdin.readline()
