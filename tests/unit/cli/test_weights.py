"""`kvarn quantize`, `kvarn imatrix` and `kvarn evaluate` as processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvarn.cli.weights.evaluate import RunOptions, evaluate
from tests.float_model import write_float_model, write_text
from tests.forked import COMMAND
from tests.recurrent_model import write_state_space_model
from tests.unit.cli.conftest import Kvarn


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float_model(tmp_path_factory.mktemp("source") / "source.gguf", width=64, hidden=96)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("texts")
    return write_text(folder / "calibration.txt", seed=1), write_text(folder / "held-out.txt", seed=2)


def test_from_a_source_to_a_judged_file(kvarn: Kvarn, source: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    matrix, small, plot = (str(tmp_path / name) for name in ("model.imatrix", "small.gguf", "curve.svg"))
    calibration, held_out = map(str, texts)
    done = kvarn("imatrix", str(source), "--text", calibration, "-o", matrix, "--chunks", "6", "--context", "64")
    assert done.returncode == 0, done.stderr
    assert b"6 chunks of 64 tokens of calibration.txt" in done.stdout
    done = kvarn("quantize", str(source), "Q4_K_M", "--imatrix", matrix, "-o", small)
    assert done.returncode == 0, done.stderr
    assert b"Q4_K does not fit rows of 64, now Q5_0" in done.stdout
    common = ("--against", str(source), "--chunks", "3", "--context", "64")
    done = kvarn("evaluate", small, "--text", held_out, *common, "--tensors", "--plot", plot)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    own, made = figures["models"]
    assert own["divergence"] is None
    assert made["divergence"]["kl_mean"] > 0
    assert {one["type"] for one in figures["tensors"][small]} >= {"Q5_0", "Q8_0", "F32"}
    assert b"bits/weight" in done.stdout
    assert Path(plot).read_text().startswith("<svg")
    refused = kvarn("evaluate", small, "--text", calibration, *common)
    assert refused.returncode == 2
    assert b"calibrated with" in refused.stderr


def test_matrices_without_statistics_are_told(kvarn: Kvarn, texts: tuple[Path, Path], tmp_path: Path) -> None:
    source, matrix = write_state_space_model(tmp_path / "states.gguf"), tmp_path / "states.imatrix"
    common = ("--chunks", "4", "--context", "32", "-o", str(matrix))
    done = kvarn("imatrix", str(source), "--text", str(texts[0]), *common)
    assert done.returncode == 0, done.stderr
    evenly = b"8 matrices have no statistics in the imatrix, all columns weigh the same: blk.0.ssm_in.weight, "
    assert evenly in done.stdout
    done = kvarn("quantize", str(source), "Q4_0", "--imatrix", str(matrix), "-o", str(tmp_path / "small.gguf"))
    assert done.returncode == 0, done.stderr
    assert evenly in done.stdout


def test_a_file_of_a_size_is_made_by_measurement(
    kvarn: Kvarn, source: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    small, size = tmp_path / "small.gguf", source.stat().st_size * 4 // 10
    done = kvarn("quantize", str(source), "--bytes", str(size), "--text", str(texts[0]), "-o", str(small))
    assert done.returncode == 0, done.stderr
    assert b"on the text" in done.stdout
    assert 0.995 * size <= small.stat().st_size <= size


def test_json_of_a_quantised_file_lists_every_tensor(kvarn: Kvarn, source: Path, tmp_path: Path) -> None:
    done = kvarn("quantize", str(source), "q8_0", "-o", str(tmp_path / "out.gguf"), "--json")
    report = json.loads(done.stdout)
    assert report["mix"] == "Q8_0"
    assert report["num_bytes"] == (tmp_path / "out.gguf").stat().st_size
    assert {one["type"] for one in report["tensors"]} == {"Q8_0", "F32"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Q9_X"], b"Q4_K_M"),
        (["Q4_0", "--imatrix", "/no/such/file"], b"no such file"),
        (["Q4_0", "--threads", "0"], b"threads"),
        ([], b"give one of TYPE, --bytes, --bpw"),
        (["Q4_0", "--bytes", "100000"], b"TYPE and --bytes given"),
        (["--bytes", "0", "--text", "/no/such/file"], b"bytes is 0"),
        (["--bpw", "0.5"], b"--text"),
        (["Q4_0", "--text", "/no/such/file"], b"imatrix"),
        (["Q4_0", "--method", "gptq"], b"--text"),
        (["Q4_0", "--method", "magic"], b"gptq"),
        (["Q4_0", "--method", "imatrix"], b"--imatrix"),
        (["Q4_0", "--method", "rtn", "--imatrix", "/no/such/file"], b"rtn"),
        (["--bpw", "5", "--text", "/no/such/file"], b"No such file"),
    ],
)
def test_wrong_usage_is_one_sentence(
    kvarn: Kvarn, source: Path, tmp_path: Path, arguments: list[str], message: bytes
) -> None:
    done = kvarn("quantize", str(source), *arguments, "-o", str(tmp_path / "out.gguf"))
    assert done.returncode in (1, 2), done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out.gguf").exists()


def test_plot_and_tensors_need_a_source(kvarn: Kvarn, source: Path, texts: tuple[Path, Path]) -> None:
    done = kvarn("evaluate", str(source), "--text", str(texts[0]), "--tensors")
    assert done.returncode == 2
    assert b"--against" in done.stderr


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(
    kvarn: Kvarn, source: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").write_text("mine")
    for name, message in (("model.gguf", b".svg"), ("no/curve.svg", b"does not exist")):
        arguments = ("--text", str(texts[0]), "--against", str(source), "--plot", str(tmp_path / name))
        done = kvarn("evaluate", str(source), *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert not done.stdout
    assert (tmp_path / "model.gguf").read_text() == "mine"


def test_a_picture_that_cannot_be_written_leaves_the_older_one(
    source: Path, texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    plot = tmp_path / "curve.svg"
    plot.write_text("older")
    monkeypatch.setattr("os.replace", full)
    run = RunOptions(chunks=2, context=64)
    with pytest.raises(OSError, match="No space"):
        evaluate(models=[str(source)], text=[texts[0]], run=run, against=str(source), plot=plot)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["older"]


def test_rounding_a_second_time_is_confirmed_and_says_what_is_lost(kvarn: Kvarn, source: Path, tmp_path: Path) -> None:
    once, twice = str(tmp_path / "once.gguf"), str(tmp_path / "twice.gguf")
    assert kvarn("quantize", str(source), "Q8_0", "-o", once).returncode == 0
    refused = kvarn("quantize", once, "Q4_0", "-o", twice)
    assert refused.returncode == 2
    assert b"--requantize" in refused.stderr
    done = kvarn("quantize", once, "Q4_0", "-o", twice, "--requantize")
    assert done.returncode == 0, done.stderr
    assert b"tensors were quantised already (Q8_0): what their first rounding lost stays lost" in done.stdout


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes seconds to quantise."""
    return write_float_model(tmp_path_factory.mktemp("large") / "large.gguf", width=1024, hidden=4096)


def is_writing(process_id: int, folder: Path) -> bool:
    """Whether a process has a file of a folder open, with a name or without."""
    links = Path(f"/proc/{process_id}/fd").iterdir()
    with suppress(FileNotFoundError):  # one that was closed meanwhile
        return any(os.readlink(link).startswith(str(folder)) for link in links)
    return False


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_process_leaves_nothing_behind(
    large: Path, tmp_path: Path, environment: dict[str, str], method: str, number: signal.Signals
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    command = [*COMMAND, "quantize", str(large), "Q4_K_M", "-o", str(output / "out.gguf"), "--threads", "1"]
    if method == "gptq":
        command += ["--method", "gptq", "--text", str(write_text(tmp_path / "text.txt", num_words=4000))]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not is_writing(process.pid, output) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[number]
    assert not list(output.iterdir())


FILL_THE_DISK = """
set -e
mount -t tmpfs -o size=100m tmpfs "$FOLDER"
"$@" & writer=$!
until ls -l /proc/$writer/fd | grep -q "$FOLDER"; do kill -0 $writer; sleep 0.01; done
dd if=/dev/zero of="$FOLDER/filler" bs=1M status=none 2>/dev/null || true
wait $writer || echo "status $?"
rm -f "$FOLDER/filler"
ls -A "$FOLDER"
"""


def test_a_disk_that_fills_up_is_one_sentence_and_leaves_nothing(
    large: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    space = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*space, f"mount -t tmpfs tmpfs {tmp_path}"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody mount a small disk")
    command = [*COMMAND, "quantize", str(large), "Q4_K_M", "-o", str(tmp_path / "out.gguf"), "--threads", "1"]
    done = subprocess.run(
        [*space, FILL_THE_DISK, "sh", *command],
        env=environment | {"FOLDER": str(tmp_path)},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.split() == [b"status", b"1"], done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(b"kvarn: No space left on device")
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["quantize", "imatrix", "evaluate"])
def test_help_has_an_example(kvarn: Kvarn, command: str) -> None:
    assert b"Example: kvarn" in kvarn(command, "--help").stdout
