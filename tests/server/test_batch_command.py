"""`kvarn batch`: every line answered exactly once, whatever ends the process; broken lines are told, the others run."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from kvarn import LLM, SamplingParams, TokenEvent
from kvarn.errors import ConfigError
from kvarn.server.access.keys import ANONYMOUS
from kvarn.server.batches.answer_log import AnswerLog
from kvarn.server.batches.batch_run import BatchRun
from kvarn.server.batches.in_process import InProcess
from kvarn.server.batches.lines import BatchLine
from kvarn.server.batches.offline import Processes, run_offline
from kvarn.server.process.serve import make_state
from kvarn.server.process.settings import make_config
from tests.chat_model import write_chat_model
from tests.conftest import Record, Size
from tests.server.process import ROOT

WAIT_S = 300.0
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


def request(custom_id: str, text: str = "hi", url: str = CHAT, **fields: Any) -> str:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "seed": 1, **fields}
    body |= {"messages": [{"role": "user", "content": text}]} if url == CHAT else {"prompt": text}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def start(source: Path, target: Path, model: Path, *args: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvarn.cli.main", "batch", str(source), "-o", str(target), "-m", f"tiny={model}"]
    return subprocess.Popen([*command, *args], cwd=ROOT, stderr=subprocess.PIPE)


def run(source: Path, target: Path, model: Path, *args: str) -> tuple[int, str]:
    process = start(source, target, model, *args)
    _, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, errors.decode()


def answers(target: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in target.read_text().splitlines()]


def num_lines(target: Path) -> int:
    return target.read_bytes().count(b"\n") if target.exists() else 0


@pytest.mark.parametrize("args", [(), ("--workers", "2")], ids=["one", "workers"])
def test_each_line_is_answered_exactly_once_after_three_kills(
    tiny: Path, tmp_path: Path, size: Size, record: Record, args: tuple[str, ...]
) -> None:
    number = size(1000, 10_000)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(request(f"r{index}", f"n {index}", seed=index) + "\n" for index in range(number)))
    for kill in range(3):
        process, before = start(source, target, tiny, *args), num_lines(target)
        while num_lines(target) < before + number // 16:
            assert process.poll() is None, process.stderr.read() if process.stderr else b""
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert num_lines(target) < number, f"kill {kill} came too late"
        whole = target.read_bytes()
        target.write_bytes(whole[: whole.rstrip(b"\n").rfind(b"\n") + 20])  # the last line was torn
    code, errors = run(source, target, tiny, *args)
    assert code == 0, errors
    told = Counter(answer["custom_id"] for answer in answers(target))
    assert told == Counter(f"r{index}" for index in range(number))
    assert all(answer["response"]["status_code"] == 200 for answer in answers(target))
    record(f"batch-kills-{args[-1] if args else 1}", {"lines": number, "kills": 3, "answered": len(told), "twice": 0})
    known = target.read_bytes()
    assert run(source, target, tiny)[0] == 0
    assert target.read_bytes() == known, "an answered line was asked again"


def test_workers_give_the_same_answers_and_one_that_is_killed_costs_none(tiny: Path, tmp_path: Path) -> None:
    """Two processes with an engine each; one is killed in the middle and started again."""
    source = tmp_path / "in.jsonl"
    source.write_text(
        "".join(request(f"r{n}", f"n {n}", seed=n, temperature=0.9, max_tokens=24) + "\n" for n in range(200))
    )
    alone, shared = tmp_path / "alone.jsonl", tmp_path / "shared.jsonl"
    assert run(source, alone, tiny)[0] == 0
    process = start(source, shared, tiny, "--workers", "2", "--concurrency", "4")
    while num_lines(shared) < 40:
        assert process.poll() is None, process.stderr.read() if process.stderr else b""
        time.sleep(0.002)
    workers = workers_of(process)
    assert len(workers) == 2
    os.kill(min(workers), signal.SIGKILL)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    assert said(shared) == said(alone)
    assert len(answers(shared)) == 200
    for worker in workers:
        assert not Path(f"/proc/{worker}").exists(), "a worker outlives the batch"


def test_a_worker_that_is_killed_while_it_starts_again_is_told_in_words(tiny: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(request(f"r{n}", max_tokens=100, ignore_eos=True) + "\n" for n in range(200)))
    process = start(source, target, tiny, "--workers", "2", "--concurrency", "4")
    while num_lines(target) < 40:
        assert process.poll() is None, process.stderr.read() if process.stderr else b""
        time.sleep(0.002)
    first = workers_of(process)
    os.kill(max(first), signal.SIGKILL)
    while not (again := workers_of(process) - first):
        assert process.poll() is None, process.stderr.read() if process.stderr else b""
    os.kill(again.pop(), signal.SIGKILL)
    _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, num_lines(target)) == (0, 200), errors
    assert b"could not be started again, the others go on: a worker ended with code -9" in errors
    assert b"Traceback" not in errors


def workers_of(process: subprocess.Popen[bytes]) -> set[int]:
    found = set()
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with suppress(OSError):  # it has ended just now
            if b"workers.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.add(int(child))
    return found


def test_the_file_for_which_there_is_no_room_is_named(tmp_path: Path) -> None:
    line = BatchLine(0, "a", CHAT, b"{}")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with AnswerLog(tmp_path / "out.jsonl") as log:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(OSError, match=r"out\.jsonl"):
                log.add_answer(line, 200, "id", b'"' + b"x" * 200 + b'"')
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(AnswerLog(tmp_path / "out.jsonl")) == 0, "a part of an answer counts"


def said(target: Path) -> dict[str, str]:
    """The text of each answer."""
    return {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in answers(target)}


def test_workers_end_with_the_command_and_their_failures_are_told(tiny: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(request(f"r{n}", max_tokens=500, ignore_eos=True) + "\n" for n in range(400)))
    process = start(source, target, tiny, "--workers", "2")
    while num_lines(target) < 1:
        assert process.poll() is None, process.stderr.read() if process.stderr else b""
        time.sleep(0.01)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "workers outlive the command"
        time.sleep(0.05)
    code, errors = run(source, target, tmp_path / "none.gguf", "--workers", "2")
    assert (code, "none.gguf" in errors) == (1, True), errors
    assert "Traceback" not in errors
    code, errors = run(source, target, tiny, "--workers", "512")
    assert (code, "workers is 512" in errors) == (2, True), errors


BROKEN = {
    2: ('{"custom_id": ', "invalid_json_line"),
    3: ("[1, 2]", "invalid_json_line"),
    4: ('{"custom_id": "d", "method": "POST", "url": "/v1/chat/completions"}', "missing_required_parameter"),
    5: (request("e").replace("POST", "GET"), "invalid_method"),
    6: (request("f").replace(CHAT, "/v1/files"), "invalid_url"),
    7: (request("good"), "duplicate_custom_id"),
    8: (request("h", stream=True), "unsupported_parameter"),
    9: (request(""), "invalid_custom_id"),
    10: (request("j").replace('{"custom', '{"extra": 1, "custom'), "unknown_parameter"),
    11: (request("k").replace('"k"', '"k", "custom_id": "l"'), "invalid_json_line"),
}


def test_broken_lines_are_told_by_number_and_the_others_run(tiny: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [request("good"), *(line for line, _ in BROKEN.values()), "", request("cold", temperature=-1)]
    source.write_text("\n".join([*lines, request("last", url="/v1/completions")]))  # without a line break at the end
    code, errors = run(source, target, tiny)
    assert code == 1
    assert "13 lines answered; 11 failed" in errors
    told = answers(target)
    broken = {one["error"]["line"]: one["error"] for one in told if one["error"] is not None}
    assert {line: error["code"] for line, error in broken.items()} == {line: code for line, (_, code) in BROKEN.items()}
    assert all(error["message"].startswith(f"line {line}: ") for line, error in broken.items())
    ran = {one["custom_id"]: one["response"] for one in told if one["error"] is None}
    assert {name: one["status_code"] for name, one in ran.items()} == {"good": 200, "cold": 400, "last": 200}
    assert ran["cold"]["body"]["error"]["param"] == "temperature"
    source.write_text("\n".join([*lines, request("last", url="/v1/completions"), request("more")]))
    run(source, target, tiny)
    assert Counter(one["custom_id"] for one in answers(target) if one["error"] is None).total() == 4


def refusal(source: Path, target: Path, model: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        run_offline(
            make_config({"models": (f"tiny={model}",)}), source, target, Processes(), lambda _done, _total: None
        )
    return str(caught.value)


def test_files_that_are_no_output_are_left_alone(tiny: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "notes.txt"
    source.write_text(request("a") + "\n")
    target.write_text("my notes\n")
    assert "is no answer of a batch" in refusal(source, target, tiny)
    assert target.read_text() == "my notes\n"
    assert "which has the requests" in refusal(source, source, tiny)
    with AnswerLog(tmp_path / "out.jsonl"):
        assert "another process" in refusal(source, tmp_path / "out.jsonl", tiny)


def engine_cpu_s(path: Path, prompts: list[str], max_tokens: int) -> float:
    """CPU seconds of the engine alone for these prompts; of one thread, as threads that wait for each other turn."""
    ended = SimpleQueue[TokenEvent]()
    with LLM(path, threads=1) as llm:
        params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
        llm.generate("warm", SamplingParams(max_tokens=2))
        began = time.process_time()
        for prompt in prompts:
            llm.submit(
                [{"role": "user", "content": prompt}],
                params,
                on_token=lambda event: ended.put(event) if event.finish_reason is not None else None,
            )
        for _ in prompts:
            ended.get()
        return time.process_time() - began


def batch_cpu_s(path: Path, prompts: list[str], max_tokens: int, target: Path) -> float:
    """The same as a batch, without the load."""

    async def measured() -> float:
        settings = {"models": (f"tiny={path}",), "queue_limit": 4096, "request_timeout_s": 1e6}
        config = make_config(settings | {"engine": {"threads": 1}})
        state = make_state(config)
        await state.models.start()
        lines = []
        for index, prompt in enumerate(prompts):
            text = request(f"r{index}", prompt, max_tokens=max_tokens, ignore_eos=True)
            lines.append(BatchLine(index + 1, f"r{index}", CHAT, json.dumps(json.loads(text)["body"]).encode()))
        with AnswerLog(target) as log:
            began = time.process_time()
            await BatchRun(InProcess(state), ANONYMOUS, log, lambda: None).run(
                iter(lines), 2 * config.engine.max_running
            )
            spent = time.process_time() - began
        await state.models.close()
        return spent

    return asyncio.run(measured())


@pytest.mark.long
@pytest.mark.model
def test_a_batch_costs_little_more_than_the_engine_alone(tmp_path: Path, size: Size, record: Record) -> None:
    from tests.assets import smollm2

    prompts = [f"Write about the number {index} in the life of a miller." for index in range(size(16, 256))]
    ratios = []
    for turn in range(5):
        alone = engine_cpu_s(smollm2(), prompts, 64)
        ratios.append(alone / batch_cpu_s(smollm2(), prompts, 64, tmp_path / f"{turn}.jsonl"))
    record("batch-throughput", {"engine_cpu_over_batch_cpu": ratios})
    assert statistics.median(ratios) >= 0.95
