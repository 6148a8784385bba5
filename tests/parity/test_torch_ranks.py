"""The life of worker processes: started by the SDK, lost in the middle of an answer, ended with rank 0."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvarn import LLM, EngineConfig, SamplingParams
from kvarn.errors import BackendError, ConfigError
from tests.assets import smollm2
from tests.chat_model import write_chat_model
from tests.children import child_ids
from tests.parity.test_torch_reference import _loaded as loaded
from tests.running import batch_of, scattered_table
from tests.tiny_models import tiny_model
from tests.torch_backend import on_ranks, torch_world

torch = pytest.importorskip("torch")
WORKER = "kvarn.backends.torch.parallel.worker"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TWO = EngineConfig(backend="torch", device="cpu", tensor_parallel=2, context=1024, threads=2)
LEFT_S = 20.0  # within which processes must have ended


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model") / "chat.gguf")


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[str]]:
    """What lies in the folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: [path.name for path in tmp_path.glob("kvarn-ranks-*")]


def _wait_until(is_so: Callable[[], bool]) -> bool:
    ends_at = time.monotonic() + LEFT_S
    while not is_so() and time.monotonic() < ends_at:
        time.sleep(0.02)
    return is_so()


KILLED = (signal.SIGKILL, "was killed by SIGKILL")
STOPPED = pytest.param(signal.SIGSTOP, "was stopped by a signal", marks=pytest.mark.long)


@pytest.mark.parametrize(("sent", "told"), [KILLED, STOPPED], ids=["killed", "stopped"])
def test_a_lost_worker_fails_what_runs_and_ends_the_engine(
    model: Path, folders: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, told: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with LLM(model, backend="torch", context=1024, threads=2) as llm:
        expected = llm.generate("Hello there", GREEDY)
    with LLM(model, backend="torch", context=1024, threads=2, tensor_parallel=2) as llm:
        assert llm.generate("Hello there", GREEDY).token_ids == expected.token_ids
        assert llm.client.is_alive
        assert len(folders()) == 1
        stream = llm.stream("Hello", GREEDY.replace(max_tokens=900))
        waiting = llm.submit("Hi", GREEDY.replace(max_tokens=900))
        assert next(stream).finish_reason is None
        (worker,) = child_ids(WORKER)
        os.kill(worker, sent)
        with pytest.raises(BackendError, match=rf"worker 1 of 2 ranks \(process {worker}\) {told}"):
            for _ in stream:
                pass
        with pytest.raises(BackendError, match=told):
            waiting.result(LEFT_S)
        assert _wait_until(lambda: not llm.client.is_alive)
        with pytest.raises(BackendError, match=rf"gave up: worker 1.*{told}.*load the model again"):
            llm.generate("Hello", GREEDY)
    assert child_ids(WORKER) == []
    assert folders() == []


@pytest.mark.long
def test_a_worker_lost_while_idle_is_noticed_without_a_request(model: Path) -> None:
    with LLM(model, config=TWO) as llm:
        (worker,) = child_ids(WORKER)
        os.kill(worker, signal.SIGKILL)
        assert _wait_until(lambda: not llm.client.is_alive)
        with pytest.raises(BackendError, match="was killed by SIGKILL"):
            llm.generate("Hello", GREEDY)


def test_workers_end_with_a_rank_0_that_was_killed(model: Path, tmp_path: Path) -> None:
    """Also one that is in the middle of a sum; the file in which ranks met goes, too."""
    code = (
        "import sys, tempfile; from kvarn import LLM, EngineConfig, SamplingParams; tempfile.tempdir = sys.argv[2]\n"
        "config = EngineConfig(backend='torch', device='cpu', tensor_parallel=2, context=1024, threads=1)\n"
        "llm = LLM(sys.argv[1], config=config)\n"
        "params = SamplingParams(max_tokens=900, ignore_eos=True)\n"
        "for event in llm.stream('Hello', params): print('token', flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(model), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        assert rank_0.stdout.readline() == "token\n"
        (worker,) = child_ids(WORKER, rank_0.pid)
        rank_0.kill()
        rank_0.wait()
        assert _wait_until(lambda: not Path(f"/proc/{worker}").exists())
    assert _wait_until(lambda: not list(tmp_path.glob("kvarn-ranks-*")))


@pytest.mark.long
def test_a_rank_that_does_not_answer_is_waited_for_no_longer_than_the_timeout(tmp_path: Path) -> None:
    world = torch_world(2, timeout_s=3.0)
    backend = loaded(on_ranks(world), tiny_model("llama", tmp_path, "gguf"))
    world.workers.tell("join_logits", 5)  # it now waits for states that nobody sends
    with pytest.raises(BackendError, match=r"rank 0 failed|worker 1 of 2"):
        backend.forward(batch_of([([5, 6, 7], 0)], scattered_table(32, 8)))
    assert backend.lost is not None
    with pytest.raises(BackendError, match=re.escape(str(backend.lost))):
        backend.forward(batch_of([([5, 6, 7], 0)], scattered_table(32, 8)))
    backend.close()
    assert child_ids(WORKER) == []


def test_a_model_that_does_not_divide_starts_no_process(tmp_path: Path, folders: Callable[[], list[str]]) -> None:
    config = EngineConfig(backend="torch", device="cpu", tensor_parallel=3)
    with pytest.raises(ConfigError, match=r"tensor_parallel is 3.*4 attention heads; give one of 1, 2, 4"):
        LLM(tiny_model("llama", tmp_path, "gguf"), config=config)
    assert child_ids(WORKER) == []
    assert folders() == []


def test_too_few_gpus_are_told_with_the_numbers(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"4 GPUs from cuda:0 to cuda:3 are asked for.*torch sees 2; give fewer"):
        LLM(model, config=EngineConfig(backend="cuda", tensor_parallel=2, pipeline_parallel=2))
    with pytest.raises(ConfigError, match=r"cuda:2 .*torch sees 2"):
        LLM(model, config=EngineConfig(backend="cuda", device="cuda:2"))


@pytest.mark.model
@pytest.mark.long
@pytest.mark.parametrize(("tensor", "pipeline"), [(3, 1), (1, 2)])
def test_a_real_model_on_ranks_answers_as_on_one(tensor: int, pipeline: int) -> None:
    """SmolLM2 has 9 heads and 3 KV heads."""
    prompt, texts = "The capital of France is", []
    for ranks in ({}, {"tensor_parallel": tensor, "pipeline_parallel": pipeline}):
        config = EngineConfig(backend="torch", device="cpu", context=256, kv_dtype="f32", threads=2, **ranks)
        with LLM(str(smollm2()), config=config) as llm:
            texts.append(llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=24)).text)
    assert texts[0] == texts[1]
    assert "Paris" in texts[0]
