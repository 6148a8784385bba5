"""Files of llama.cpp's quantiser beside ours of the same bytes, calibrated and judged alike: KL against size.

    python -m benchmarks.quantized files smollm2 --work FOLDER [--mix Q4_0]   write the files that are missing
    python -m benchmarks.quantized judge smollm2 --work FOLDER [--mix Q4_0]   measure those that are new
    python -m benchmarks.quantized methods smollm2 --work FOLDER              every method on Q4_K_M, llama.cpp beside
    python -m benchmarks.quantized imatrix smollm2 --work FOLDER [--rounds 5] a prompt with and without statistics
    python -m benchmarks.quantized speed --work FOLDER [--rounds 3]           rtn beside llama_model_quantize

`judge` writes quantized-MODEL.json and .svg to benchmarks/results/, `methods` quantize-methods-MODEL.json, `imatrix`
imatrix-speed-MODEL.json. Sources: tests/float_source.py. Texts: Python's manual, its pages by turns for calibration and
for judging. Needs llama-cpp-python. What lies in the folder is kept.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
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
from kvarn.evaluation.plot import PlotPoint, svg
from kvarn.evaluation.text import cut_chunks, read_text

MIXES = ("Q3_K_M", "Q4_0", "IQ4_NL", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0")
IMATRIX = kvarn.ImatrixOptions(chunks=24, context=256)
JUDGED = kvarn.EvaluationOptions(chunks=8, context=256)
FITTED = ("smoothquant", "awq", "gptq")
THEIRS, OURS = "llama.cpp with imatrix", "kvarn --bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantised files beside llama.cpp's.")
    parser.add_argument("what", choices=("files", "judge", "methods", "imatrix", "speed"))
    parser.add_argument("model", nargs="?", choices=tuple(SOURCES), default="qwen-coder")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--mix", action="append")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    bench = QuantizedFiles(args.model, args.work)
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
        bench.judge(args.mix or MIXES)
        bench.draw()
        return
    for mix in args.mix or MIXES:
        bench.write(mix)


class QuantizedFiles:
    """Files of one source in a folder."""

    def __init__(self, model: str, work: Path) -> None:
        self._model, self._work = model, work
        self._source = float_source(model)
        self._calibration, self._held_out = texts(work, is_long=True)

    def path(self, mix: str, maker: str) -> Path:
        return self._work / f"{self._model}-{mix}-{maker}.gguf"

    def write(self, mix: str) -> None:
        """llama.cpp's file of a mix, and ours of at most its bytes."""
        matrix, theirs, ours = self._matrix(), self.path(mix, "llama"), self.path(mix, "size")
        if not theirs.exists():
            _run_llama(self._source, theirs, mix, "--imatrix", str(matrix))
        if not ours.exists():
            measured = self._work / f"{self._model}.measured"
            options = kvarn.QuantizeOptions(imatrix=matrix, text=self._calibration, measured=measured)
            target = kvarn.SizeTarget(num_bytes=theirs.stat().st_size)
            report = kvarn.quantize(self._source, target, ours, options=options)
            print(mix, theirs.stat().st_size, report.num_bytes, report.types(), f"{report.seconds:.0f} s", flush=True)

    def judge(self, mixes: Sequence[str]) -> None:
        """Measure both files of each mix against the source and keep the figures."""
        found = self._figures()
        names = [f"{mix}-{maker}" for mix in mixes for maker in ("llama", "size")]
        new = {name: self.path(*name.split("-")) for name in names if name not in found}
        if not new:
            return
        reports = evaluate_all(list(new.values()), text=self._held_out, against=self._source, options=JUDGED)
        found |= {name: report.as_dict() for name, report in zip(("source", *new), reports, strict=True)}
        write_result(f"quantized-{self._model}", found, command=f"python -m benchmarks.quantized judge {self._model}")
        for report in reports[1:]:
            print(json.dumps(report.as_dict()), flush=True)

    def methods(self, mix: str) -> None:
        """A mix by every method beside llama.cpp's file of it; the sizes beside them are in quantized-MODEL.json."""
        matrix, text = self._matrix(), self._calibration
        made: dict[str, dict[str, Any]] = {"rtn": {"method": "rtn"}, "imatrix": {"imatrix": matrix}}
        made |= {name: {"method": name, "imatrix": matrix, "text": text} for name in FITTED}
        if not self.path(mix, "llama").exists():
            _run_llama(self._source, self.path(mix, "llama"), mix, "--imatrix", str(matrix))
        for name, options in made.items():
            if not self.path(mix, name).exists():
                kvarn.quantize(self._source, mix, self.path(mix, name), options=kvarn.QuantizeOptions(**options))
        names = ["llama", *made]
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
        (RESULTS / f"quantized-{self._model}.svg").write_text(svg(points, f"{self._model}: divergence from F16"))

    def imatrix_speed(self, rounds: int) -> dict[str, float]:
        """Tokens per second of a pass that collects, over those of plain prompts, turn by turn in one process."""
        config = EngineConfig(context=IMATRIX.context, backend="native")
        models = {name: load_model(self._source, config) for name in ("plain", "observed")}
        backend = models["observed"].backend
        assert isinstance(backend, NativeBackend)
        backend.observe_inputs()
        ids = cut_chunks(read_text(self._calibration), models["plain"].tokenizer, IMATRIX.context, 8).ids
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(rounds + 1):  # the first one warms up
            for name, model in models.items():
                started = time.perf_counter()
                for chunk in ids:
                    for _states in token_states(model.backend, model.engine.kv, chunk, model.engine.max_batch_tokens):
                        pass
                seconds[name].append(time.perf_counter() - started)
        found = {f"{name}_tokens_per_s": ids.size / statistics.median(some[1:]) for name, some in seconds.items()}
        found["ratio"] = found["observed_tokens_per_s"] / found["plain_tokens_per_s"]
        write_result(
            f"imatrix-speed-{self._model}", found, command=f"python -m benchmarks.quantized imatrix {self._model}"
        )
        return found

    def speed(self, rounds: int, mixes: list[str]) -> dict[str, dict[str, float]]:
        """Medians of both without an imatrix, turn by turn: seconds of the quantiser, processor time of the process."""
        found = {}
        for mix in mixes:
            runs: dict[str, list[float]] = {"ours_s": [], "ours_cpu_s": [], "llama_cpp_s": [], "llama_cpp_cpu_s": []}
            for _ in range(rounds):
                for name, run in (("ours", _run_ours), ("llama_cpp", _run_llama)):
                    before = _processor_time()
                    runs[f"{name}_s"].append(run(self._source, self._work / f"speed-{name}.gguf", mix))
                    runs[f"{name}_cpu_s"].append(_processor_time() - before)
            medians = {name: statistics.median(values) for name, values in runs.items()}
            ratios = {f"ratio{unit}": medians[f"ours{unit}"] / medians[f"llama_cpp{unit}"] for unit in ("_s", "_cpu_s")}
            found[mix] = medians | ratios
            print(mix, runs, flush=True)
        write_result(f"quantize-speed-{self._model}", found, command="python -m benchmarks.quantized speed")
        return found

    def _matrix(self) -> Path:
        path = self._work / f"{self._model}.imatrix"
        if not path.exists():
            kvarn.collect_imatrix(self._source, path, text=self._calibration, options=IMATRIX)
        return path

    def _figures(self) -> dict[str, Any]:
        path = RESULTS / f"quantized-{self._model}.json"
        return dict(json.loads(path.read_text())["figures"]) if path.exists() else {}


def _processor_time() -> float:
    """Of all processes that ended, the start of Python included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run_ours(source: Path, output: Path, mix: str) -> float:
    """The report's seconds: as llama.cpp's, without the start of Python."""
    command = [sys.executable, "-m", "kvarn", "quantize", str(source), mix, "-o", str(output), "--force", "--json"]
    done = subprocess.run([*command, "--method", "rtn"], check=True, capture_output=True)
    return float(json.loads(done.stdout)["seconds"])


def _run_llama(source: Path, output: Path, mix: str, *options: str) -> float:
    command = [sys.executable, "-m", "benchmarks.engines.llama_quantize", str(source), str(output), mix, *options]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
