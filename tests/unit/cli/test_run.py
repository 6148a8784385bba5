"""`kvarn run` as a process: output, exit codes, and one sentence for every kind of bad input."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chat_model import write_chat_model
from tests.forked import COMMAND
from tests.unit.cli.conftest import Kvarn

FIXED = ("--temperature", "0", "--max-tokens", "8")


def assert_one_sentence(done: subprocess.CompletedProcess[bytes], *parts: str, code: int = 1) -> None:
    error = done.stderr.decode()
    assert done.returncode == code, error
    assert "Traceback" not in error
    assert done.stdout == b""
    assert error.startswith("kvarn: ")
    assert error.count("\n") == 1
    for part in parts:
        assert part in error


def test_an_answer_goes_to_stdout_and_its_speed_to_stderr(kvarn: Kvarn, model: str) -> None:
    done = kvarn("run", "-m", model, *FIXED, "hello")
    assert done.returncode == 0
    assert done.stdout.endswith(b"\n")
    assert b"first token after" in done.stderr


def test_more_threads_than_cpus_work_and_are_warned_of(kvarn: Kvarn, model: str) -> None:
    num_cpus = os.cpu_count() or 1
    done = kvarn("run", "-m", model, *FIXED, "--threads", str(num_cpus + 1), "hello")
    assert done.returncode == 0
    assert f"threads is {num_cpus + 1}, more than the CPUs this process may use" in done.stderr.decode()


def test_json_is_one_object_with_everything(kvarn: Kvarn, model: str) -> None:
    done = kvarn("run", "-m", model, *FIXED, "--json", "hello")
    answer = json.loads(done.stdout)
    assert done.stdout.count(b"\n") == 1
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) <= 8
    assert answer["finish_reason"] in ("stop", "length")
    assert {"text", "seed", "timings", "model"} <= answer.keys()


def test_stdin_is_the_prompt_for_a_dash(kvarn: Kvarn, model: str) -> None:
    answers = [
        json.loads(kvarn("run", "-m", model, *FIXED, "--json", *how, stdin=stdin).stdout)
        for how, stdin in ((("häuser",), b""), (("-",), "häuser".encode()))
    ]
    assert answers[0]["text"] == answers[1]["text"]
    assert answers[0]["usage"] == answers[1]["usage"]


def test_a_model_without_a_template_is_run_raw(kvarn: Kvarn, tmp_path: Path) -> None:
    path = str(write_chat_model(tmp_path / "plain.gguf", **{"tokenizer.chat_template": None}))
    done = kvarn("run", "ab", "-m", path, "--max-tokens", "2")
    assert done.returncode == 1
    assert done.stderr.startswith(b"kvarn: the model has no chat template; add --raw")
    assert kvarn("run", "ab", "-m", path, "--max-tokens", "2", "--raw").returncode == 0


def test_raw_leaves_out_the_template(kvarn: Kvarn, model: str) -> None:
    done = kvarn("run", "-m", model, *FIXED, "--json", "--raw", "hello")
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] == 5
    done = kvarn("run", "-m", model, *FIXED, "--json", "hello")
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] == 8


def test_a_suffix_asks_for_what_fits_between(kvarn: Kvarn, model: str, tmp_path: Path) -> None:
    keys = {f"tokenizer.ggml.fim_{name}_token_id": 257 + place for place, name in enumerate(("pre", "suf", "mid"))}
    coder = str(write_chat_model(tmp_path / "coder.gguf", **keys))
    done = kvarn("run", "-m", coder, *FIXED, "--json", "--suffix", "end", "hello")
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] == len("helloend") + 3
    assert_one_sentence(kvarn("run", "-m", model, "--suffix", "end", "hello"), "no tokens for filling in the middle")
    assert kvarn("run", "-m", coder, "--suffix", "end", "--system", "Be brief.", "hello").returncode == 2


def test_a_seed_repeats_an_answer(kvarn: Kvarn, model: str) -> None:
    texts = [
        json.loads(kvarn("run", "-m", model, "-n", "20", "-t", "1.5", "--seed", seed, "--json", "hi").stdout)["text"]
        for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("name", ["no-such-alias", "./no/such/file.gguf", "a" * 5000, "../../etc/passwd", ""])
def test_a_model_that_does_not_exist_is_one_sentence(kvarn: Kvarn, name: str) -> None:
    assert_one_sentence(kvarn("run", "-m", name, "hello"))


def test_an_empty_folder_is_no_model(kvarn: Kvarn, tmp_path: Path) -> None:
    assert_one_sentence(kvarn("run", "-m", str(tmp_path), "hello"))


def test_a_fifo_is_no_model_and_does_not_hang(kvarn: Kvarn, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert_one_sentence(kvarn("run", "-m", str(tmp_path / "pipe.gguf"), "hello"))


@pytest.mark.parametrize("data", [b"", b"GGUF", b"\0" * 1000, b"GGUF\x03\0\0\0" + b"\xff" * 64], ids=repr)
def test_a_file_that_is_no_model_is_one_sentence(kvarn: Kvarn, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    assert_one_sentence(kvarn("run", "-m", str(path), "hello"), "bad.gguf")


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.999])
def test_a_truncated_model_is_one_sentence(kvarn: Kvarn, model: str, tmp_path: Path, share: float) -> None:
    data = Path(model).read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    assert_one_sentence(kvarn("run", "-m", str(path), "hello"), "cut.gguf")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--temperature", "-1"),
        ("--top-p", "1.5"),
        ("--top-p", "nan"),
        ("--max-tokens", "0"),
        ("--max-tokens", "99999999999"),
        ("--seed", "99999999999999999999999"),
        ("--threads", "0"),
        ("--context", "-1"),
        ("--context", "99999999999"),
    ],
)
def test_values_out_of_range_are_named(kvarn: Kvarn, model: str, option: str, value: str) -> None:
    assert_one_sentence(
        kvarn("run", "-m", model, f"{option}={value}", "hello"), option.strip("-").replace("-", "_"), code=2
    )


def test_invalid_utf8_on_stdin_is_one_sentence_with_the_byte(kvarn: Kvarn, model: str) -> None:
    done = kvarn("run", "-m", model, "-", stdin=b"ok \xff\xfe")
    assert_one_sentence(done, "not valid UTF-8", "0xff at offset 3", code=2)


def test_an_invalid_utf8_argument_is_one_sentence(kvarn: Kvarn, model: str) -> None:
    assert_one_sentence(kvarn("run", "-m", model, b"caf\xe9"), "not valid UTF-8", code=2)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(kvarn: Kvarn, model: str) -> None:
    done = kvarn("run", "-m", model, "--context", "32", "--raw", "x" * 100)
    assert_one_sentence(done, "prompt has 100 tokens", "31")


def test_a_context_beyond_the_models_is_refused(kvarn: Kvarn, model: str) -> None:
    assert_one_sentence(kvarn("run", "-m", model, "--context", "100000", "hello"), "100,000", "2,048", code=2)


@pytest.mark.parametrize(
    "arguments", [("run",), ("run", "--no-such-option", "x"), ("no-such-command",), ("run", "--max-tokens", "x", "y")]
)
def test_wrong_usage_is_exit_code_2(kvarn: Kvarn, arguments: tuple[str, ...]) -> None:
    done = kvarn(*arguments)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


def test_system_with_raw_is_wrong_usage(kvarn: Kvarn, model: str) -> None:
    assert kvarn("run", "-m", model, "--raw", "--system", "x", "y").returncode == 2


@pytest.mark.parametrize("command", ["run", "chat", "show", "pull", "ls", "rm", "doctor"])
def test_every_command_explains_itself(kvarn: Kvarn, command: str) -> None:
    done = kvarn(command, "--help")
    assert done.returncode == 0
    assert b"Usage:" in done.stdout


def test_a_reader_that_goes_away_is_no_traceback(endless: str, environment: dict[str, str]) -> None:
    command = [*COMMAND, "run", "-m", endless, "-t", "1", "hello"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    error = process.stderr.read()
    process.wait(timeout=60)
    assert b"Traceback" not in error
    assert b"Exception ignored" not in error


def test_an_interrupt_ends_with_130_and_no_traceback(endless: str, environment: dict[str, str]) -> None:
    command = [*COMMAND, "run", "-m", endless, "-t", "1", "hello"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in error


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output_is_no_failure(model: str, environment: dict[str, str], closed: str) -> None:
    command = shlex.join([*COMMAND, "run", "-m", model, *FIXED, "hello"])
    done = _shell(f"{command} {closed}", environment)
    assert done.returncode == 0
    assert b"error" not in done.stderr


@pytest.mark.parametrize("stdin", ["<&-", "</dev/null"])
def test_an_empty_stdin_is_no_prompt(model: str, environment: dict[str, str], stdin: str) -> None:
    command = shlex.join([*COMMAND, "run", "-m", model, "-"])
    done = _shell(f"{command} {stdin}", environment)
    assert_one_sentence(done, "stdin is empty", code=2)


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("doctor",), ("ls",), ("--version",)])
def test_a_full_disk_under_the_output_is_one_sentence(environment: dict[str, str], arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, timeout=60, env=environment, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"kvarn: No space left on device; ")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("offset", [8, 16, 40, 200, 2_000, 4_000])
def test_a_damaged_model_is_one_sentence_with_the_file_and_a_remedy(
    kvarn: Kvarn, model: str, tmp_path: Path, offset: int
) -> None:
    data = bytearray(Path(model).read_bytes())
    data[offset : offset + 8] = b"\xff" * 8
    path = tmp_path / "hurt.gguf"
    path.write_bytes(data)
    assert_one_sentence(kvarn("run", "-m", str(path), "hello"), "hurt.gguf", "again")


def _shell(line: str, environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(line, shell=True, capture_output=True, timeout=60, env=environment, check=False)


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "kvarn", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("kvarn ")
