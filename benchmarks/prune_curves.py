"""What pruning costs a model: layers, channels, heads and splits of budgets, each judged on held-out text.

    python -m benchmarks.prune_curves curve MODEL --text FILE --held-out FILE --work FOLDER --cut layers=3 ffn=0.1
    python -m benchmarks.prune_curves decode MODEL --work FOLDER --cut layers=3 [--rounds 5]

`curve` writes benchmarks/results/prune-NAME.json and .svg, and leaves the files in the folder; what lies there is not
made again. The activations of the source are collected once for all of them. `decode` takes turns between the source
and the files of these cuts: tokens per second of one answer at a time, beside the bytes that each token reads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.results import RESULTS, write_result

import kvarn
from kvarn.evaluation.evaluate import evaluate_all
from kvarn.evaluation.plot import PlotPoint, svg
from kvarn.pruning.options import PruneOptions, PruneTarget
from kvarn.pruning.planner import CutPlanner
from kvarn.pruning.prune import PruneJob
from kvarn.quantization.source import ModelSource, open_source

KINDS = {"keep": float, "layers": int, "ffn": float, "heads": float}
SERIES = {"layers": "layers", "ffn": "channels", "heads": "heads", "keep": "the measured split"}
DECODED_TOKENS = 96


def main() -> None:
    """One of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curve", "decode"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="to choose by")
    parser.add_argument("--held-out", type=Path, help="to judge by")
    parser.add_argument("--chunks", type=int, default=8, help="of 512 tokens, to judge by")
    parser.add_argument("--cut", nargs="+", default=[], help="layers=3, ffn=0.1,refit=0, ffn=0.1,by=random, ...")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    figures = curve(arguments) if arguments.what == "curve" else decode(arguments)
    print(json.dumps(figures))


def curve(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the files that are missing and judge all of them."""
    name, known = f"prune-{arguments.model.stem}", arguments.work / f"{arguments.model.stem}.json"
    made: dict[str, Any] = json.loads(known.read_text()) if known.exists() else {}
    missing = [cut for cut in arguments.cut if cut not in made]
    if missing:
        with closing(open_source(arguments.model)) as source:
            options = PruneOptions(text=arguments.text, force=True)
            with PruneJob(arguments.model, source, PruneTarget(layers=1), options, None).planner(
                arguments.work
            ) as planner:
                for cut in missing:
                    made[cut] = _file(arguments, source, cut, planner)
                    known.write_text(json.dumps(made))
    judged = kvarn.EvaluationOptions(chunks=arguments.chunks)
    files = [path_of(arguments, cut) for cut in arguments.cut]
    own, *reports = evaluate_all(files, text=arguments.held_out, against=arguments.model, options=judged)
    figures: dict[str, Any] = {"source": own.as_dict(), "text": arguments.text.name}
    for cut, report in zip(arguments.cut, reports, strict=True):
        figures[cut] = made[cut] | report.as_dict() | {"ratio": report.perplexity / own.perplexity}
        print(f"{cut}: perplexity {report.perplexity:.2f} ({figures[cut]['ratio']:.3f} x), {made[cut]}", flush=True)
    command = f"python -m benchmarks.prune_curves curve {arguments.model.name} --cut {' '.join(arguments.cut)}"
    write_result(name, figures, command=command)
    (RESULTS / f"{name}.svg").write_text(svg(_points(figures), f"{arguments.model.stem}: divergence from the source"))
    return figures


def decode(arguments: argparse.Namespace) -> dict[str, Any]:
    """Speed of the source and of the files, turn by turn; ratio: speed times bytes, over the source's."""
    paths = [arguments.model, *(path_of(arguments, cut) for cut in arguments.cut)]
    params = kvarn.SamplingParams(max_tokens=DECODED_TOKENS, temperature=0.0, ignore_eos=True, reuse_cache=False)
    models = [kvarn.LLM(str(path), context=256) for path in paths]
    speeds: dict[str, list[float]] = {path.stem: [] for path in paths}
    for _ in range(arguments.rounds + 1):  # the first round warms up
        for path, model in zip(paths, models, strict=True):
            timings = model.generate("The mill stood by the river.", params).timings
            speeds[path.stem].append((DECODED_TOKENS - 1) / timings.decode_s)
    found = {}
    for path in paths:
        speed, size = statistics.median(speeds[path.stem][1:]), path.stat().st_size
        whole = statistics.median(speeds[arguments.model.stem][1:]) * arguments.model.stat().st_size
        found[path.stem] = {"tokens_per_s": speed, "bytes": size, "speed_times_bytes": speed * size / whole}
        print(f"{path.stem}: {speed:.1f} tokens/s, {size / 1e6:.1f} MB, {speed * size / whole:.3f}", flush=True)
    write_result(f"prune-decode-{arguments.model.stem}", found, command="python -m benchmarks.prune_curves decode")
    return found


def path_of(arguments: argparse.Namespace, cut: str) -> Path:
    """Where the file of a cut lies."""
    return Path(arguments.work) / f"{arguments.model.stem}-{cut.replace('=', '').replace(',', '-')}.gguf"


def _file(arguments: argparse.Namespace, source: ModelSource, cut: str, planner: CutPlanner) -> dict[str, Any]:
    started = time.process_time()
    wanted = dict(part.split("=") for part in cut.split(","))
    target = PruneTarget(**{key: KINDS[key](value) for key, value in wanted.items() if key in KINDS})
    options = PruneOptions(
        text=arguments.text, by=wanted.get("by", "influence"), then=wanted.get("then"), requantize=True, force=True
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
