"""What pruning costs a model: layers, channels, heads and splits of budgets, each judged on held-out text.

    python -m benchmarks.prune_curves MODEL --text FILE --held-out FILE --cut layers=3 ffn=0.1,by=random keep=0.9

Prints one line for each cut and, last, one line of JSON, which also goes to benchmarks/results/. The activations of the
source are collected once for all of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import kvarn
from kvarn.pruning.options import PruneOptions, PruneTarget
from kvarn.pruning.planner import CutPlanner
from kvarn.pruning.prune import PruneJob
from kvarn.quantization.source import ModelSource, open_source

RESULTS = Path(__file__).parent / "results"
KINDS = {"keep": float, "layers": int, "ffn": float, "heads": float}


def main() -> None:
    """Run the cuts one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="to choose by")
    parser.add_argument("--held-out", type=Path, required=True, help="to judge by")
    parser.add_argument("--chunks", type=int, default=8, help="of 512 tokens, to judge by")
    parser.add_argument("--cut", nargs="+", required=True, help="layers=3, ffn=0.1,refit=0, ffn=0.1,by=random, ...")
    arguments = parser.parse_args()
    with closing(open_source(arguments.model)) as source, tempfile.TemporaryDirectory() as folder:
        rows = list(_rows(arguments, source, Path(folder)))
    figures = {"model": arguments.model.name, "text": arguments.text.name, "rows": rows}
    (RESULTS / f"prune-{arguments.model.stem}.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


def _rows(arguments: argparse.Namespace, source: ModelSource, folder: Path) -> Iterator[dict[str, Any]]:
    judged = kvarn.EvaluationOptions(chunks=arguments.chunks)
    own = kvarn.evaluate(arguments.model, text=arguments.held_out, options=judged)
    print(f"source: perplexity {own.perplexity:.2f}, {own.num_bytes / 1e6:.1f} MB", flush=True)
    yield {"cut": "", "perplexity": own.perplexity, "num_bytes": own.num_bytes, "decode": own.decode_tokens_per_s}
    options = PruneOptions(text=arguments.text, force=True)
    with PruneJob(arguments.model, source, PruneTarget(layers=1), options, None).planner(folder) as planner:
        for cut in arguments.cut:
            yield _row(arguments, source, _parsed(cut), planner, folder / "small.gguf") | {"cut": cut}


def _parsed(cut: str) -> dict[str, str]:
    return dict(part.split("=") for part in cut.split(","))


def _row(
    arguments: argparse.Namespace, source: ModelSource, wanted: dict[str, str], planner: CutPlanner, output: Path
) -> dict[str, Any]:
    started = time.process_time()
    target = PruneTarget(**{key: KINDS[key](value) for key, value in wanted.items() if key in KINDS})
    options = PruneOptions(
        text=arguments.text, by=wanted.get("by", "influence"), then=wanted.get("then"), requantize=True
    )
    scores = replace(planner.scores, by=options.by, made={})
    planner = replace(planner, scores=scores, refits=wanted.get("refit") != "0", trials=[])
    job = PruneJob(arguments.model, source, target, options, None)
    report = job.write(planner, job.target.choose(planner), output)
    seconds = time.process_time() - started
    judged = kvarn.EvaluationOptions(chunks=arguments.chunks)
    found = kvarn.evaluate(output, text=arguments.held_out, against=arguments.model, options=judged)
    assert found.divergence is not None
    print(
        f"{wanted}: {report.after.shape}, {report.kept:.1%}, perplexity {found.perplexity:.2f}, "
        f"KL {found.divergence.kl_mean:.4f}, {found.num_bytes / 1e6:.1f} MB, {seconds:.0f} s of CPU",
        [(str(trial.shape), round(trial.kl, 4)) for trial in report.trials],
        flush=True,
    )
    return {
        "shape": asdict(report.after.shape),
        "kept": report.kept,
        "perplexity": found.perplexity,
        "kl": found.divergence.kl_mean,
        "top1": found.divergence.top1,
        "num_bytes": found.num_bytes,
        "decode": found.decode_tokens_per_s,
        "cpu_seconds": seconds,
        "trials": [{**asdict(trial.shape), "kl": trial.kl} for trial in report.trials],
    }


if __name__ == "__main__":
    main()
