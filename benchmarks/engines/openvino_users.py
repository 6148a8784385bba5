"""OpenVINO GenAI with several users and without HTTP: requests are added when they arrive, tokens read at each step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.engines.openvino_cb import OpenVino
from benchmarks.engines.users import Answer, Users, peak_rss_mb, summary_of


def serve_users(engine: OpenVino, users: Users) -> dict[str, Any]:
    """Answer a few other requests first, then all of these."""
    _answer(engine, replace(users, requests=2, answer=2), seed=2)
    return _answer(engine, users, seed=1) | {"rss_mb": peak_rss_mb()}


def _answer(engine: OpenVino, users: Users, seed: int) -> dict[str, Any]:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = users.answer, True, False
    waiting = list(enumerate(users.prompts(seed)))[::-1]
    active: list[tuple[Any, Answer]] = []
    answers: list[Answer] = []
    started = time.perf_counter()
    while waiting or active:
        while waiting and len(active) < users.concurrency:
            number, ids = waiting.pop()
            answers.append(Answer())
            tensor = openvino.Tensor(np.array([ids], np.int64))
            active.append((engine.pipeline.add_request(number, tensor, config), answers[-1]))
        engine.pipeline.step()
        active = [entry for entry in active if not _has_ended(*entry)]
    return summary_of(answers, time.perf_counter() - started)


def _has_ended(handle: Any, answer: Answer) -> bool:
    """Take what the step gave this request."""
    if handle.can_read():
        answer.num_tokens += sum(len(output.generated_ids) for output in handle.read().values())
        answer.times.append(time.perf_counter())
    return bool(handle.get_status() != openvino_genai.GenerationStatus.RUNNING)
