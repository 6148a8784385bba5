"""`kvarn show` and `kvarn doctor` as processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarn.models.registry import supported_families
from tests.chat_model import write_chat_model
from tests.unit.cli.conftest import Kvarn
from tests.unit.machine.tree import GIB, cpus, memory, v1, v2


def test_show_prints_metadata_spec_tensor_types_and_the_memory_plan(kvarn: Kvarn, model: str) -> None:
    done = kvarn("show", model)
    text = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    for part in ("general.name", "tiny chat", "blocks 0-1", "num_heads=2", "Q8_0", "15 tensors", "KV cache", "needed"):
        assert part in text


def test_show_prints_the_row_of_the_table_of_families(kvarn: Kvarn, model: str) -> None:
    text = kvarn("show", model).stdout.decode()
    section = " ".join(text.partition("family\n")[2].partition("\nmetadata\n")[0].split())
    title, gguf, hf, context, oracle = next(row for row in supported_families() if "llama" in row[1].split(", "))
    assert section == (
        f"family {title} GGUF general.architecture {gguf} folder model_type {hf} context by default {context} "
        f"tested against {oracle}"
    )


def test_show_lets_no_escape_sequence_through(kvarn: Kvarn, tmp_path: Path) -> None:
    path = write_chat_model(tmp_path / "evil.gguf", **{"general.name": "\x1b[2J\x1b]0;evil\x07"})
    done = kvarn("show", str(path))
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout


def test_show_of_no_model_is_one_sentence(kvarn: Kvarn) -> None:
    done = kvarn("show", "no-such-model")
    assert done.returncode == 1
    assert done.stderr.startswith(b"kvarn: ")


def test_doctor_says_what_it_sees(kvarn: Kvarn, tmp_path: Path) -> None:
    done = kvarn("doctor")
    text = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    for part in ("kernels", "torch", "threads", "because of", "memory", "cgroup limit", str(tmp_path / "home")):
        assert part in text


def test_doctor_says_why_nothing_can_be_stored(kvarn: Kvarn, environment: dict[str, str], tmp_path: Path) -> None:
    assert "set KVARN_HOME" not in kvarn("doctor").stdout.decode()
    (tmp_path / "file").touch()
    environment["KVARN_HOME"] = str(tmp_path / "file" / "home")
    done = kvarn("doctor")
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'file'} is no folder; set KVARN_HOME to another one" in done.stdout.decode()


def test_doctor_chooses_one_thread_under_a_v2_quota_of_one_core_and_says_why(kvarn: Kvarn, tmp_path: Path) -> None:
    root = cpus(tmp_path, "0-1", {0: "0", 1: "1"})
    v2(root, "/app", {"app/cpu.max": "100000 100000", "app/memory.max": str(GIB), "app/memory.current": "0"})
    text = kvarn("doctor", "--root", str(memory(root, 4 * GIB, 3 * GIB))).stdout.decode()
    assert "1, because of a cgroup quota of 1 cores (/sys/fs/cgroup/app/cpu.max)" in text
    assert "1.0 GiB: cgroup limit (/sys/fs/cgroup/app/memory.max)" in text


def test_doctor_chooses_one_thread_under_a_v1_quota_of_one_core_and_says_why(kvarn: Kvarn, tmp_path: Path) -> None:
    root = cpus(tmp_path, "0-1", {0: "0", 1: "1"})
    quota = {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"}
    v1(root, "/app", {f"cpu,cpuacct/app/{name}": text for name, text in quota.items()})
    text = kvarn("doctor", "--root", str(memory(root, 4 * GIB, 3 * GIB))).stdout.decode()
    assert "1, because of a cgroup quota of 1.5 cores" in text


def test_doctor_tells_where_torch_would_compute(kvarn: Kvarn) -> None:
    torch = pytest.importorskip("torch")
    text = kvarn("doctor").stdout.decode()
    assert torch.__version__ in text
    assert "bfloat16" in text if torch.cuda.is_available() else "CPU, float32" in text or "Apple GPU, float32" in text
