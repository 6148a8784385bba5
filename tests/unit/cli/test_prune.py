"""`kvarn prune` as a process: the report, the warning, refusals, and no half file when it is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.float_model import write_float_model, write_text
from tests.forked import COMMAND
from tests.unit.cli.conftest import Kvarn


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float_model(tmp_path_factory.mktemp("source") / "source.gguf", width=64, hidden=96)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "calibration.txt")


@pytest.fixture
def refused(kvarn: Kvarn, source: Path, text: Path, tmp_path: Path) -> Callable[[list[str]], bytes]:
    """What a wrong usage is told: one line, and no file."""

    def run(arguments: list[str]) -> bytes:
        given = [str(text) if one == "TEXT" else one for one in arguments]
        done = kvarn("prune", str(source), *given, "-o", str(tmp_path / "out.gguf"))
        assert done.returncode in (1, 2), done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "out.gguf").exists()
        return done.stderr

    return run


def test_a_report_for_people(kvarn: Kvarn, source: Path, text: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.gguf"
    done = kvarn("prune", str(source), "--layers", "2", "--text", str(text), "-o", str(small))
    assert done.returncode == 0, done.stderr
    assert b"6 layers, 2/1 heads, 96 channels; before: 8 layers" in done.stdout
    assert b"75.0% of the weights of all layers" in done.stdout
    assert b"layers removed: " in done.stdout
    assert b"warning" not in done.stderr
    assert small.stat().st_size < source.stat().st_size


def test_how_near_a_size_is_hit_is_told(kvarn: Kvarn, source: Path, text: Path, tmp_path: Path) -> None:
    small, size = tmp_path / "small.gguf", source.stat().st_size * 9 // 10
    done = kvarn("prune", str(source), "--bytes", str(size), "--text", str(text), "-o", str(small))
    assert done.returncode == 0, done.stderr
    told = f"{small.stat().st_size / size:.2%} of the {size:,} bytes allowed: channels go by 32"
    assert told.encode() in done.stdout
    copy = str(tmp_path / "copy.gguf")
    done = kvarn("prune", str(source), "--bytes", str(10 * size), "--text", str(text), "-o", copy)
    assert f"no more than the {10 * size:,} bytes allowed: nothing was removed".encode() in done.stdout
    assert b"types fill" not in done.stdout


def test_a_report_for_machines_and_a_warning(kvarn: Kvarn, source: Path, text: Path, tmp_path: Path) -> None:
    arguments = ["--ffn", "0.33", "--by", "magnitude", "--text", str(text), "--json"]
    done = kvarn("prune", str(source), *arguments, "-o", str(tmp_path / "small.gguf"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["after"]["shape"]["hidden"] == 64
    assert report["after"]["num_bytes"] == (tmp_path / "small.gguf").stat().st_size
    told = (
        f"KL {report['kl_unrounded']:.3f} on the text, the same shape by influence gives {report['influence_kl']:.3f}"
    )
    assert told.encode() in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], b"--keep X, --layers N"),
        (["--layers", "1"], b"--text"),
        (["--keep", "0.5", "--layers", "1"], b"one budget"),
        (["--keep", "1.5"], b"keep is 1.5"),
        (["--layers", "1", "--by", "magic"], b"influence"),
        (["--layers", "1", "--then", "Q9_X"], b"Q4_K_M"),
        (["--layers", "1", "--text", "TEXT", "--then", "FP8_ROW"], b"has no FP8"),
        (["--layers", "1", "--then", "Q8_0", "--bytes", "9"], b"--then and --bytes given"),
        (["--heads", "0.3", "--text", "TEXT"], b"does not divide"),
        (["--bytes", "9", "--text", "TEXT"], b"give at least"),
        (["--layers", "1", "--text", "/no/such/file"], b"No such file"),
    ],
)
def test_wrong_usage_is_one_sentence(
    refused: Callable[[list[str]], bytes], arguments: list[str], message: bytes
) -> None:
    assert message in refused(arguments)


# Stopped while it measures, and while the weights that are still to be quantised lie beside the output.
@pytest.mark.parametrize("more", [["--ffn", "0.5"], ["--layers", "4", "--then", "Q4_K_M"]], ids=["measures", "then"])
@pytest.mark.parametrize("stop", [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_stopped_process_leaves_no_output(
    text: Path, tmp_path: Path, environment: dict[str, str], stop: tuple[signal.Signals, int], more: list[str]
) -> None:
    large = write_float_model(tmp_path / "large.gguf", width=512, hidden=1024)
    output = tmp_path / "out"
    output.mkdir()
    command = [*COMMAND, "prune", str(large), *more, "--text", str(text), "-o", str(output / "out.gguf")]
    begun = b"pruned.gguf" if "--then" in more else b"second moments"
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    seen = b""
    while begun not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    time.sleep(0.2)
    process.send_signal(stop[0])
    assert process.wait(60) == stop[1]
    assert not list(output.iterdir())


def test_help_has_an_example(kvarn: Kvarn) -> None:
    assert kvarn("prune", "--help").stdout.count(b"Example: kvarn prune") == 2
