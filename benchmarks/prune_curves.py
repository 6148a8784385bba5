"""What pruning costs a model: layers, channels, heads and splits of budgets, each judged on held-out text.

    python -m benchmarks.prune_curves curve MODEL --text FILE --held-out FILE --work FOLDER --cut layers=3 ffn=0.1
    python -m benchmarks.prune_curves decode MODEL --work FOLDER --cut layers=3 [--rounds 5]
    python -m benchmarks.prune_curves agree MODEL --held-out FILE --work FOLDER --cut layers=3 ffn=0.1
    python -m benchmarks.prune_curves time MODEL --text FILE --work FOLDER [--cut keep=0.9] [--rounds 3] [--threads 2]

`curve` adds to benchmarks/results/prune-NAME.json and .svg, and leaves the files in the folder; what lies there is not
made again. Figures of other cuts stay where the source was judged alike. The activations of the source are collected
once for all of them. `decode` takes turns between the source and the files of these cuts: tokens per second of one
answer at a time, beside the bytes that each token reads; by the clock and by processor time, which other work on the
machine disturbs less. `agree` lays llama.cpp's predictions on these files beside ours (llama-cpp-python). Both want the
files of `curve`. `time` runs the command `kvarn prune` for each cut: by the clock, which wants a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.llama_cpp_agreement import agreement
from tests.results import RESULTS, write_result

import kvarn
from kvarn.evaluation.evaluate import evaluate_all
from kvarn.evaluation.plot import PlotPoint, svg
from kvarn.evaluation.text import read_text
from kvarn.pruning.options import PruneOptions, PruneTarget
from kvarn.pruning.planner import CutPlanner
from kvarn.pruning.prune import PruneJob
from kvarn.quantization.source import ModelSource, open_source

KINDS = {"keep": float, "layers": int, "ffn": float, "heads": float}
SERIES = {"layers": "layers", "ffn": "channels", "heads": "heads", "keep": "the measured split"}
DECODED_TOKENS = 96
AGREE_TOKENS = 256


def main() -> None:
    """One of the four."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curve", "decode", "agree", "time"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="to choose by")
    parser.add_argument("--held-out", type=Path, help="to judge by")
    parser.add_argument("--chunks", type=int, default=8, help="of 512 tokens, to judge by")
    parser.add_argument("--cut", nargs="+", default=[], help="layers=3, ffn=0.1,refit=0, ffn=0.1,by=random, ...")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="all cores unless told")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    figures = {"curve": curve, "decode": decode, "agree": agree, "time": timed}[arguments.what](arguments)
    print(json.dumps(figures))


def curve(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the files that are missing and judge all of them."""
    name, known = f"prune-{arguments.model.stem}", arguments.work / f"{arguments.model.stem}.json"
    made: dict[str, Any] = json.loads(known.read_text()) if known.exists() else {}
    missing = [cut for cut in arguments.cut if cut not in made]
    if missing:
        with closing(open_source(arguments.model)) as source:
            options = PruneOptions(text=arguments.text, force=True, threads=arguments.threads)
            with PruneJob(arguments.model, source, PruneTarget(layers=1), options, None).planner(
                arguments.work
            ) as planner:
                for cut in missing:
                    made[cut] = _file(arguments, source, cut, planner)
                    known.write_text(json.dumps(made))
    judged = kvarn.EvaluationOptions(chunks=arguments.chunks, threads=arguments.threads)
    files = [path_of(arguments, cut) for cut in arguments.cut]
    own, *reports = evaluate_all(files, text=arguments.held_out, against=arguments.model, options=judged)
    figures: dict[str, Any] = _known_figures(name, own.as_dict()) | {
        "source": own.as_dict(),
        "text": arguments.text.name,
    }
    for cut, report in zip(arguments.cut, reports, strict=True):
        figures[cut] = made[cut] | report.as_dict() | {"ratio": report.perplexity / own.perplexity}
        print(f"{cut}: perplexity {report.perplexity:.2f} ({figures[cut]['ratio']:.3f} x), {made[cut]}", flush=True)
    command = f"python -m benchmarks.prune_curves curve {arguments.model.name} --cut {' '.join(arguments.cut)}"
    write_result(name, figures, command=command)
    (RESULTS / f"{name}.svg").write_text(svg(_points(figures), f"{arguments.model.stem}: divergence from the source"))
    return figures


def _known_figures(name: str, source: dict[str, Any]) -> dict[str, Any]:
    """Those in the results file, where the source was judged alike: as many tokens, the same perplexity."""
    path = RESULTS / f"{name}.json"
    known: dict[str, Any] = json.loads(path.read_text())["figures"] if path.exists() else {}
    old = known.get("source", source)
    is_same = old["num_scored"] == source["num_scored"] and math.isclose(
        old["perplexity"], source["perplexity"], rel_tol=1e-3
    )
    return known if is_same else {}


def decode(arguments: argparse.Namespace) -> dict[str, Any]:
    """Speed of the source and of the files, turn by turn; ratio: speed times bytes, over the source's."""
    paths = [arguments.model, *(path_of(arguments, cut) for cut in arguments.cut)]
    params = kvarn.SamplingParams(max_tokens=DECODED_TOKENS, temperature=0.0, ignore_eos=True, reuse_cache=False)
    models = [kvarn.LLM(str(path), context=256, threads=arguments.threads) for path in paths]
    speeds: dict[str, list[tuple[float, float]]] = {path.stem: [] for path in paths}
    for _ in range(arguments.rounds + 1):  # the first round warms up
        for path, model in zip(paths, models, strict=True):
            started = time.process_time()
            timings = model.generate("The mill stood by the river.", params).timings
            elapsed = time.process_time() - started
            speeds[path.stem].append(((DECODED_TOKENS - 1) / timings.decode_s, DECODED_TOKENS / elapsed))
    found = {}
    for path in paths:
        size, own_size = path.stat().st_size, arguments.model.stat().st_size
        speed, per_cpu_s = _medians(speeds[path.stem][1:])
        own, own_per_cpu_s = _medians(speeds[arguments.model.stem][1:])
        found[path.stem] = {
            "tokens_per_s": speed,
            "tokens_per_cpu_s": per_cpu_s,
            "bytes": size,
            "speed_times_bytes": speed * size / (own * own_size),
            "cpu_speed_times_bytes": per_cpu_s * size / (own_per_cpu_s * own_size),
        }
        print(f"{path.stem}: {found[path.stem]}", flush=True)
    write_result(f"prune-decode-{arguments.model.stem}", found, command="python -m benchmarks.prune_curves decode")
    return found


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def agree(arguments: argparse.Namespace) -> dict[str, Any]:
    """KL(ours || llama.cpp's) on the source and on each file."""
    import llama_cpp

    text, found = read_text(arguments.held_out), {}
    for path in (arguments.model, *(path_of(arguments, cut) for cut in arguments.cut)):
        found[path.stem] = agreement(llama_cpp, path, text, AGREE_TOKENS)
        print(f"{path.stem}: {found[path.stem]}", flush=True)
    command = f"python -m benchmarks.prune_curves agree {arguments.model.name}"
    write_result(f"llama-cpp-reads-pruned-{arguments.model.stem}", found, command=command)
    return found


def timed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over whole processes of the command: seconds by the clock and of the processor."""
    found: dict[str, Any] = {}
    for cut in arguments.cut or ["keep=0.9"]:
        flags = [f"--{part.replace('=', ' ')}" for part in cut.split(",")]
        output, threads = arguments.work / "timed.gguf", str(arguments.threads or 2)
        command = [sys.executable, "-m", "kvarn", "prune", str(arguments.model), *" ".join(flags).split(), "--json"]
        command += ["--text", str(arguments.text), "-o", str(output), "--threads", threads, "--force"]
        runs = []
        for _ in range(arguments.rounds):
            before, started = _children_cpu(), time.perf_counter()
            report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            runs.append((time.perf_counter() - started, _children_cpu() - before))
        seconds, cpu_seconds = _medians(runs)
        found[cut] = {"seconds": seconds, "cpu_seconds": cpu_seconds, "threads": int(threads), "kept": report["kept"]}
        found[cut] |= {"shapes": len(report["trials"]), "load": os.getloadavg()[0]}
        print(f"{cut}: {found[cut]}", flush=True)
    command_line = f"python -m benchmarks.prune_curves time {arguments.model.name} --cut {' '.join(found)}"
    write_result(f"prune-time-{arguments.model.stem}", found, command=command_line)
    return found


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def path_of(arguments: argparse.Namespace, cut: str) -> Path:
    """Where the file of a cut lies."""
    return Path(arguments.work) / f"{arguments.model.stem}-{cut.replace('=', '').replace(',', '-')}.gguf"


def _file(arguments: argparse.Namespace, source: ModelSource, cut: str, planner: CutPlanner) -> dict[str, Any]:
    started = time.process_time()
    wanted = dict(part.split("=") for part in cut.split(","))
    target = PruneTarget(**{key: KINDS[key](value) for key, value in wanted.items() if key in KINDS})
    options = PruneOptions(
        text=arguments.text,
        by=wanted.get("by", "influence"),
        then=wanted.get("then"),
        requantize=True,
        force=True,
        threads=arguments.threads,
    )
    scores = replace(planner.scores, by=options.by, made={})
    planner = replace(planner, scores=scores, refits=wanted.get("refit") != "0", trials=[])
    job = PruneJob(arguments.model, source, target, options, None)
    report = job.write(planner, job.target.choose(planner), path_of(arguments, cut))
    found = {
        "shape": asdict(report.after.shape),
        "kept": report.kept,
        "cpu_seconds": time.process_time() - started,
        "trials": [{**asdict(trial.shape), "kl": trial.kl} for trial in report.trials],
    }
    print(cut, found, flush=True)
    return found


def _points(figures: dict[str, Any]) -> list[PlotPoint]:
    """The cuts by influence; the others are in the table."""
    found = [
        PlotPoint(cut, one["num_bytes"] / 1e6, one["divergence"]["kl_mean"], one["divergence"]["kl_mean_error"], series)
        for cut, one in figures.items()
        for series in (SERIES.get(cut.partition("=")[0]),)
        if series is not None and "," not in cut
    ]
    return sorted(found, key=lambda point: point.megabytes)


if __name__ == "__main__":
    main()
