"""Files of llama.cpp's quantiser beside ours of the same bytes, calibrated and judged alike: KL against size.

    python -m benchmarks.quantized files smollm2 --work FOLDER [--mix Q4_0]   write the files that are missing
    python -m benchmarks.quantized judge smollm2 --work FOLDER [--mix Q4_0]   measure those that are new
    python -m benchmarks.quantized sizes smollm2 --work FOLDER --bpw 4.5      sizes for which llama.cpp has no mix
    python -m benchmarks.quantized methods smollm2 --work FOLDER              every method on Q4_K_M, llama.cpp beside
    python -m benchmarks.quantized imatrix smollm2 --work FOLDER [--rounds 5] a prompt with and without statistics
    python -m benchmarks.quantized speed --work FOLDER [--rounds 3]           rtn beside a native llama_model_quantize

`judge` writes quantized-MODEL.json and .svg to benchmarks/results/, `methods` quantize-methods-MODEL.json, `imatrix`
imatrix-speed-MODEL.json. Sources: tests/float_source.py. Texts: Python's manual, its pages by turns for calibration and
for judging. Needs llama-cpp-python. What lies in the folder is kept. --threads: all cores unless told.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.float_source import SOURCES, float_source
from tests.parity.test_size_beside_mix import texts
from tests.results import RESULTS, write_result

import kvarn
from kvarn.backends.native.backend import NativeBackend
from kvarn.config import EngineConfig
from kvarn.engine.embed_score import token_states
from kvarn.engine.load import load_model
from kvarn.evaluation.evaluate import evaluate_all
from kvarn.evaluation.plot import BitScale, PlotPoint, svg
from kvarn.evaluation.text import cut_chunks, read_text

MIXES = ("Q3_K_M", "Q4_0", "IQ4_NL", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0")
IMATRIX = kvarn.ImatrixOptions(chunks=24, context=256)
JUDGED = kvarn.EvaluationOptions(chunks=8, context=256)
FITTED = ("smoothquant", "awq", "gptq")
PEER_FLAGS = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_vnni": "AVX512_VNNI"}  # as the kernel and llama.cpp say it
THEIRS, OURS = "llama.cpp with imatrix", "kvarn --bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantised files beside llama.cpp's.")
    parser.add_argument("what", choices=("files", "judge", "sizes", "methods", "imatrix", "speed"))
    parser.add_argument("model", nargs="?", choices=tuple(SOURCES), default="qwen-coder")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--mix", action="append")
    parser.add_argument("--bpw", action="append", type=float, default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    bench = QuantizedFiles(args.model, args.work, args.threads)
    if args.what == "speed":
        print(json.dumps(bench.speed(args.rounds, args.mix or ["Q4_K_M", "Q4_0"])))
        return
    if args.what == "imatrix":
        print(json.dumps(bench.imatrix_speed(args.rounds)))
        return
    if args.what == "methods":
        bench.methods((args.mix or ["Q4_K_M"])[0])
        return
    if args.what == "judge":
        bench.judge(
            {f"{mix}-{maker}": bench.path(mix, maker) for mix in args.mix or MIXES for maker in ("llama", "size")}
        )
        bench.draw()
        return
    if args.what == "sizes":
        bench.judge({f"{bpw}-bpw": bench.sized(kvarn.SizeTarget(bits_per_weight=bpw), str(bpw)) for bpw in args.bpw})
        bench.draw()
        return
    for mix in args.mix or MIXES:
        bench.write(mix)


class QuantizedFiles:
    """Files of one source in a folder."""

    def __init__(self, model: str, work: Path, threads: int | None = None) -> None:
        self._model, self._work, self._threads = model, work, threads
        self._source = float_source(model)
        self._calibration, self._held_out = texts(work, is_long=True)

    def path(self, mix: str, maker: str) -> Path:
        return self._work / f"{self._model}-{mix}-{maker}.gguf"

    def write(self, mix: str) -> None:
        """llama.cpp's file of a mix, and ours of at most its bytes."""
        theirs = self.path(mix, "llama")
        if not theirs.exists():
            _run_llama(self._source, theirs, mix, "--imatrix", str(self.matrix()), *self._their_threads())
        self.sized(kvarn.SizeTarget(num_bytes=theirs.stat().st_size), mix)

    def sized(self, target: kvarn.SizeTarget, name: str) -> Path:
        """Our file of a size."""
        matrix, ours = self.matrix(), self.path(name, "size")
        if not ours.exists():
            measured = self._work / f"{self._model}.measured"
            options = kvarn.QuantizeOptions(
                imatrix=matrix, text=self._calibration, measured=measured, threads=self._threads
            )
            report = kvarn.quantize(self._source, target, ours, options=options)
            print(name, target, report.num_bytes, report.types(), f"{report.seconds:.0f} s", flush=True)
        return ours

    def judge(self, files: Mapping[str, Path]) -> None:
        """Measure files against the source and keep the figures."""
        found = self._figures()
        new = {name: path for name, path in files.items() if name not in found}
        if not new:
            return
        options = replace(JUDGED, threads=self._threads)
        reports = evaluate_all(list(new.values()), text=self._held_out, against=self._source, options=options)
        found |= {name: report.as_dict() for name, report in zip(("source", *new), reports, strict=True)}
        write_result(f"quantized-{self._model}", found, command=f"python -m benchmarks.quantized judge {self._model}")
        for report in reports[1:]:
            print(json.dumps(report.as_dict()), flush=True)

    def methods(self, mix: str) -> None:
        """A mix by every method beside llama.cpp's file of it, and files of its size."""
        matrix, text, theirs = self.matrix(), self._calibration, self.path(mix, "llama")
        made: dict[str, dict[str, Any]] = {"rtn": {"method": "rtn"}, "imatrix": {"imatrix": matrix}}
        made |= {name: {"method": name, "imatrix": matrix, "text": text} for name in FITTED}
        made["size-gptq"] = made["gptq"] | {"measured": self._work / f"{self._model}.measured"}
        self.write(mix)
        for name, options in made.items():
            target = kvarn.SizeTarget(num_bytes=theirs.stat().st_size) if name.startswith("size") else mix
            if not self.path(mix, name).exists():
                kvarn.quantize(self._source, target, self.path(mix, name), options=kvarn.QuantizeOptions(**options))
        names = ["llama", "size", *made]
        files = [self.path(mix, name) for name in names]
        reports = evaluate_all(files, text=self._held_out, against=self._source, options=JUDGED)
        figures = {name: report.as_dict() for name, report in zip(("source", *names), reports, strict=True)}
        command = f"python -m benchmarks.quantized methods {self._model} --mix {mix}"
        write_result(f"quantize-methods-{self._model}", figures, command=command)
        for report in reports[1:]:
            print(json.dumps(report.as_dict()), flush=True)

    def draw(self) -> None:
        """Both curves."""
        points = [
            PlotPoint(
                name.rpartition("-")[0] if name.endswith("-llama") else "",
                one["num_bytes"] / 1e6,
                one["divergence"]["kl_mean"],
                one["divergence"]["kl_mean_error"],
                THEIRS if name.endswith("-llama") else OURS,
            )
            for name, one in self._figures().items()
            if one["divergence"] is not None
        ]
        points.sort(key=lambda point: point.megabytes)
        source = self._figures()["source"]
        weights = source["num_weights"]
        scale = BitScale(weights, source["num_bytes"] - source["bits_per_weight"] * weights / 8)
        drawn = svg(points, f"{self._model}: divergence from F16", scale)
        (RESULTS / f"quantized-{self._model}.svg").write_text(drawn)

    def imatrix_speed(self, rounds: int) -> dict[str, float]:
        """Tokens per second of a pass that collects, over those of plain prompts, turn by turn in one process.

        By the clock and by processor time, which other work on the machine disturbs less.
        """
        config = EngineConfig(context=IMATRIX.context, backend="native", threads=self._threads)
        models = {name: load_model(self._source, config) for name in ("plain", "observed")}
        backend = models["observed"].backend
        assert isinstance(backend, NativeBackend)
        backend.observe_inputs()
        ids = cut_chunks(read_text(self._calibration), models["plain"].tokenizer, IMATRIX.context, 8).ids
        seconds: dict[str, list[float]] = {name: [] for model in models for name in (model, f"{model}_cpu")}
        for _ in range(rounds + 1):  # the first one warms up
            for name, model in models.items():
                started, started_cpu = time.perf_counter(), time.process_time()
                for chunk in ids:
                    for _states in token_states(model.backend, model.engine.kv, chunk, model.engine.max_batch_tokens):
                        pass
                seconds[name].append(time.perf_counter() - started)
                seconds[f"{name}_cpu"].append(time.process_time() - started_cpu)
        found = {f"{name}_tokens_per_s": ids.size / statistics.median(some[1:]) for name, some in seconds.items()}
        found["ratio"] = found["observed_tokens_per_s"] / found["plain_tokens_per_s"]
        found["ratio_cpu"] = found["observed_cpu_tokens_per_s"] / found["plain_cpu_tokens_per_s"]
        command = f"python -m benchmarks.quantized imatrix {self._model}"
        write_result(f"imatrix-speed-{self._model}", found, command=command)
        return found

    def speed(self, rounds: int, mixes: list[str]) -> dict[str, Any]:
        """Medians of both without an imatrix, turn by turn: seconds of the quantiser, processor time of the process."""
        found: dict[str, Any] = {"llama_cpp": _native_peer()}
        threads = ["--threads", str(self._threads or 2)]
        for mix in mixes:
            runs: dict[str, list[float]] = {"ours_s": [], "ours_cpu_s": [], "llama_cpp_s": [], "llama_cpp_cpu_s": []}
            for _ in range(rounds):
                for name, run in (("ours", _run_ours), ("llama_cpp", _run_llama)):
                    before = _processor_time()
                    runs[f"{name}_s"].append(run(self._source, self._work / f"speed-{name}.gguf", mix, *threads))
                    runs[f"{name}_cpu_s"].append(_processor_time() - before)
            medians = {name: statistics.median(values) for name, values in runs.items()}
            ratios = {f"ratio{unit}": medians[f"ours{unit}"] / medians[f"llama_cpp{unit}"] for unit in ("_s", "_cpu_s")}
            found[mix] = medians | ratios
            print(mix, runs, flush=True)
        command = f"python -m benchmarks.quantized speed {self._model} --mix {' --mix '.join(mixes)}"
        write_result(f"quantize-speed-{self._model}-{'-'.join(mixes)}", found, command=command)
        return found

    def _their_threads(self) -> list[str]:
        return [] if self._threads is None else ["--threads", str(self._threads)]

    def matrix(self) -> Path:
        """The imatrix of the source, collected on the first call."""
        path = self._work / f"{self._model}.imatrix"
        if not path.exists():
            options = replace(IMATRIX, threads=self._threads)
            kvarn.collect_imatrix(self._source, path, text=self._calibration, options=options)
        return path

    def _figures(self) -> dict[str, Any]:
        path = RESULTS / f"quantized-{self._model}.json"
        return dict(json.loads(path.read_text())["figures"]) if path.exists() else {}


def _processor_time() -> float:
    """Of all processes that ended, the start of Python included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _native_peer() -> str:
    """What llama.cpp says it was compiled for; refused where that is less than this machine has."""
    import llama_cpp

    told = llama_cpp.llama_print_system_info().decode()
    cpuinfo = Path("/proc/cpuinfo")
    has = cpuinfo.read_text().split() if cpuinfo.exists() else []
    missing = [flag for name, flag in PEER_FLAGS.items() if name in has and f"{flag} = 1" not in told]
    if missing:
        raise SystemExit(
            f"llama.cpp was built without {', '.join(missing)}; build it for this machine: make .venv/.peers"
        )
    return str(told)


def _run_ours(source: Path, output: Path, mix: str, *options: str) -> float:
    """The report's seconds: as llama.cpp's, without the start of Python."""
    command = [sys.executable, "-m", "kvarn", "quantize", str(source), mix, "-o", str(output), "--force", "--json"]
    done = subprocess.run([*command, "--method", "rtn", *options], check=True, capture_output=True)
    return float(json.loads(done.stdout)["seconds"])


def _run_llama(source: Path, output: Path, mix: str, *options: str) -> float:
    command = [sys.executable, "-m", "benchmarks.engines.llama_quantize", str(source), str(output), mix, *options]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
