"""Templates against constraints: JSON schemas filled by a diffusion model, and written from left to right by its twin.

    python -m benchmarks.fill [--schemas 40] [--threads 1] [--write fill-tiny]

The twin is tiny-diffusion itself read as a causal model: the same matrices, vocabulary and kernels, so that only the
way of writing differs; what it writes is nonsense. Both take turns with the same schema, and are compared by CPU
seconds of the process, compiled schemas included. An answer of the twin may have as many tokens as the filled canvas.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
from tests.parity.test_fill import number, random_object
from tests.results import write_result

from kvarn import LLM, JsonSchema, SamplingParams
from kvarn.fill import Filled
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.open import open_weights
from kvarn.hub import BUNDLED
from kvarn.types import Completion

DIFFUSION, CAUSAL = "llada.", "llama."
PROMPT = "Once upon a time. "


def main() -> None:
    """Print a table for people and one JSON line, last, for machines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemas", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", metavar="NAME", help="keep the figures in benchmarks/results/NAME.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        twin = write_twin(Path(folder) / "twin.gguf")
        with LLM("tiny-diffusion", threads=options.threads) as filling, LLM(twin, threads=options.threads) as writing:
            rounds = [compare(filling, writing, seed) for seed in range(options.schemas + 1)][1:]  # the first warms up
            figures = {"schemas": len(rounds), "threads": options.threads, "isa": writing.isa, **summary(rounds)}
    if options.write:
        write_result(options.write, figures, command=f"python -m benchmarks.fill --schemas {options.schemas}")
    print(json.dumps(figures))


def write_twin(path: Path) -> Path:
    """The bundled model as one that writes from left to right."""
    source = open_weights(BUNDLED["tiny-diffusion"])
    metadata = {name.replace(DIFFUSION, CAUSAL): value for name, value in source.metadata.items()}
    for name in ("llama.attention.causal", "diffusion.shift_logits", "tokenizer.ggml.mask_token_id"):
        del metadata[name]
    metadata["general.architecture"] = CAUSAL.removesuffix(".")
    tensors = {name: Stored(info.type, info.shape, source.raw(name)) for name, info in source.tensors.items()}
    write_gguf(path, metadata, tensors)
    source.close()
    return path


def compare(filling: LLM, writing: LLM, seed: int) -> dict[str, float]:
    """One schema, both ways."""
    schema = random_object(random.Random(seed), depth=2)
    texts: list[str] = []
    filled, *filled_s = timed(lambda: _kept(filling.fill(schema, prompt=PROMPT), texts))
    params = SamplingParams(temperature=0.0, max_tokens=len(filled.token_ids), constraint=JsonSchema(schema))
    written, *written_s = timed(lambda: writing.generate(PROMPT, params))
    return {
        "filled_s": filled_s[0],
        "filled_clock_s": filled_s[1],
        "filled_tokens": len(filled.token_ids),
        "filled_whole": is_valid(schema, texts[0]),
        "written_s": written_s[0],
        "written_clock_s": written_s[1],
        "written_tokens": len(written.token_ids),
        "written_whole": is_valid(schema, written.text),
    }


def _kept(filled: Filled, texts: list[str]) -> Completion:
    texts.append(filled.text)
    return filled.completion


def is_valid(schema: dict[str, Any], text: str) -> float:
    """1.0 for JSON that follows the schema."""
    try:
        return float(jsonschema_rs.validator_for(schema).is_valid(json.loads(text, parse_float=number)))
    except ValueError:
        return 0.0


def timed(work: Callable[[], Completion]) -> tuple[Completion, float, float]:
    """What it gives, CPU seconds, seconds of the clock."""
    begun = time.process_time(), time.perf_counter()
    completion = work()
    return completion, time.process_time() - begun[0], time.perf_counter() - begun[1]


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, and whose answers were whole within their room."""
    figures: dict[str, Any] = {}
    for name in ("filled", "written"):
        figures[f"{name}_ms"] = round(1000 * statistics.median(one[f"{name}_s"] for one in rounds), 1)
        figures[f"{name}_tokens"] = statistics.median(one[f"{name}_tokens"] for one in rounds)
        figures[f"{name}_ms_per_token"] = round(
            1000 * statistics.median(one[f"{name}_s"] / one[f"{name}_tokens"] for one in rounds), 3
        )
        figures[f"{name}_whole"] = sum(one[f"{name}_whole"] for one in rounds) / len(rounds)
        print(
            f"{name:8} {figures[f'{name}_ms']:8.1f} ms a schema, {figures[f'{name}_ms_per_token']:6.2f} ms a token,"
            f" {figures[f'{name}_tokens']:4.0f} tokens, {100 * figures[f'{name}_whole']:.0f}% whole"
        )
    ratio = statistics.median(one["written_s"] / one["filled_s"] for one in rounds)
    both = [one for one in rounds if one["written_whole"]]
    figures["written_to_filled"] = round(ratio, 3)
    figures["written_to_filled_where_whole"] = (
        round(statistics.median(one["written_s"] / one["filled_s"] for one in both), 3) if both else None
    )
    return figures


if __name__ == "__main__":
    main()
