"""llama.cpp's mix and our file of its bytes, pair by pair, judged on thousands of tokens of two kinds of text.

    python -m benchmarks.quantized files smollm2 --work FOLDER --mix Q4_K_M --mix Q4_0
    python -m benchmarks.quantized_pairs smollm2 --work FOLDER [--mix Q4_K_M] [--chunks 64]

The first writes the files, calibrated by every second page of Python's manual. The second judges them by the pages
between and by Wikipedia (exllamav3's text for calibration), and writes quantized-pairs-MODEL.json.
64 chunks of 256 tokens, whose second halves are scored, are 8,128 tokens: the 99.9% is the ninth largest.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.assets import wiki
from tests.float_source import SOURCES, float_source
from tests.parity.test_size_beside_mix import texts
from tests.results import write_result

from benchmarks.quantized import JUDGED, QuantizedFiles
from kvarn.evaluation.evaluate import evaluate_all

MIXES = ("Q4_K_M", "Q4_0")
MEASURES = ("kl_mean", "kl_999")


def main() -> None:
    """Judge the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=tuple(SOURCES))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--mix", action="append")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    mixes, files = args.mix or list(MIXES), QuantizedFiles(args.model, args.work)
    held_out = {"manual": texts(args.work, is_long=True)[1], "wikipedia": wiki()}
    figures = {}
    for name, text in held_out.items():
        figures[name] = _judged(args, files, mixes, text)
        for mix in mixes:
            print(name, mix, figures[name][mix]["of_llama_cpp"], flush=True)
    write_result(f"quantized-pairs-{args.model}", figures, command=f"python -m benchmarks.quantized_pairs {args.model}")
    print(json.dumps(figures))


def _judged(args: argparse.Namespace, files: QuantizedFiles, mixes: list[str], text: Path) -> dict[str, Any]:
    """Reports of each mix's two files, and our divergences as shares of llama.cpp's."""
    options = replace(JUDGED, chunks=args.chunks, threads=args.threads)
    paths = [files.path(mix, maker) for mix in mixes for maker in ("llama", "size")]
    own, *reports = evaluate_all(paths, text=text, against=float_source(args.model), options=options)
    found: dict[str, Any] = {"source": own.as_dict()}
    for at, mix in enumerate(mixes):
        theirs, ours = (report.as_dict() for report in reports[2 * at : 2 * at + 2])
        shares = {name: ours["divergence"][name] / theirs["divergence"][name] for name in MEASURES}
        found[mix] = {"llama_cpp": theirs, "ours": ours, "of_llama_cpp": shares}
    return found


if __name__ == "__main__":
    main()
