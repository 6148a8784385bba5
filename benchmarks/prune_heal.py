"""Prune a tenth of a model's layers away and heal it on a GPU: perplexity before, after pruning, after healing.

    python -m benchmarks.prune_heal MODEL --text FILE --held-out FILE [--minutes 10]

Needs the model (SmolLM2: 98 MB), the texts (2 MB of Wikipedia) and torch with CUDA; without a GPU it heals on the CPU.
Prints a table and, last, one line of JSON, which also goes to benchmarks/results/prune-heal-NAME.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import kvarn

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Prune, heal, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="to choose by and to learn from")
    parser.add_argument("--held-out", type=Path, required=True, help="to judge by")
    parser.add_argument("--keep", type=float, default=0.9)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--chunks", type=int, default=16, help="of 512 tokens, to judge by")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = _figures(arguments, Path(folder))
    (RESULTS / f"prune-heal-{arguments.model.stem}.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


def _figures(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    judged = kvarn.EvaluationOptions(chunks=arguments.chunks)
    target, perplexity = kvarn.PruneTarget(keep=arguments.keep), {}
    perplexity["source"] = kvarn.evaluate(arguments.model, text=arguments.held_out, options=judged).perplexity
    figures: dict[str, Any] = {"model": arguments.model.name, "keep": arguments.keep}
    for name, minutes in (("pruned", None), ("healed", arguments.minutes)):
        options = kvarn.PruneOptions(text=arguments.text, heal_minutes=minutes, then="F16", requantize=True)
        report = kvarn.prune(arguments.model, target, folder / f"{name}.gguf", options=options)
        found = kvarn.evaluate(folder / f"{name}.gguf", text=arguments.held_out, options=judged)
        perplexity[name] = found.perplexity
        figures[name] = report.as_dict()
        print(
            f"{name}: {report.after.shape}, perplexity {found.perplexity:.2f} of {perplexity['source']:.2f}", flush=True
        )
    ratios = {name: value / perplexity["source"] for name, value in perplexity.items()}
    return {**figures, "perplexity": perplexity, "ratio": ratios}


if __name__ == "__main__":
    main()
