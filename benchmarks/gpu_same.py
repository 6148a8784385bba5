"""Same request, same bytes through kvarn.LLM: 40 mixed requests alone, together, chunked, preempted, forked, cached.

    python -m benchmarks.gpu_same [--model FILE ...] [--family NAME ...] [--backend cuda] [--kv-dtype bf16]

Half of the requests are sampled, half share a prefix of 300 tokens, every fifth has two answers. Tokens and the bits of
their log-probabilities are compared with the first run, one request after the other in a fresh cache. Each way tells
whether it happened: cached tokens, preemptions, prompts cut into chunks. --shape: random weights in that shape.
--family: a tiny model of benchmarks.gpu_families, the same in an eighth of the context and without looking for the
fastest kernels. Needs no compiled core for files in float types. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    from kvarn.backends.native import _native  # noqa: F401
except ImportError:  # only quantising would need it
    sys.modules["kvarn.backends.native._native"] = types.ModuleType("_native")

import kvarn
from kvarn.bench.synthetic import write_model

COUNT, SHARED = 40, 300
CONTEXT, FAMILY_CONTEXT = 1024, 128
FEW_CONTEXTS = 3  # that a cache has room for in which 40 requests are in each other's way
Request = tuple[list[int], kvarn.SamplingParams]
Answer = list[tuple[list[int], list[float]]]


def requests(vocabulary: int, context: int = CONTEXT, seed: int = 0) -> list[Request]:
    """Prompts of 20 to 700 tokens, answers of 5 to 60; shorter prompts where the context is."""
    chooser = random.Random(seed)
    first, longest = min(100, vocabulary // 4), 400 * context // CONTEXT
    prefix = [chooser.randrange(first, vocabulary) for _ in range(SHARED * context // CONTEXT)]
    found = []
    for index in range(COUNT):
        own = [chooser.randrange(first, vocabulary) for _ in range(chooser.randint(min(20, longest), longest))]
        params = kvarn.SamplingParams(
            max_tokens=chooser.randint(5, min(60, context // 4)), temperature=0.8 * (index % 2), top_p=0.9,
            seed=index, ignore_eos=True, n=2 if index % 5 == 4 else 1, logprobs=1,
        )  # fmt: skip
        found.append((prefix + own if index % 4 < 2 else own, params))
    return found


def told(handles: Sequence[Any]) -> tuple[list[Answer], int]:
    """Tokens and log-probabilities of every choice, and how many tokens of prompts were cached."""
    answers, cached = [], 0
    for handle in handles:
        result = handle.result()
        cached += result.usage.cached_tokens
        choices = (result, *result.alternatives)
        answers.append([(list(one.token_ids), [at.logprob for at in one.logprobs or ()]) for one in choices])
    return answers, cached


def engine(path: Path, given: argparse.Namespace, **settings: Any) -> kvarn.LLM:
    config = kvarn.EngineConfig(backend=given.backend, kv_dtype=given.kv_dtype, context=given.context)
    return kvarn.LLM(path, config=replace(config, **settings))


def compare(path: Path, given: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with engine(path, given, kv_bytes=given.kv_bytes, max_batch_tokens=2048, max_running=64) as llm:
        asked = requests(min(given.vocabulary, llm.spec.vocab_size), given.context)
        alone = [told([llm.submit(ids, replace(params, reuse_cache=False))])[0][0] for ids, params in asked]
        together, cached = told([llm.submit(*one) for one in asked])
        again, cached_again = told([llm.submit(*one) for one in reversed(asked)])
        found["together"] = {"same": _same(alone, together), "cached_tokens": cached}
        found["again"] = {"same": _same(alone, again[::-1]), "cached_tokens": cached_again}
        stats = llm.stats()
        block_bytes = given.kv_bytes // stats.blocks_total
    few = FEW_CONTEXTS * given.context // stats.block_size
    with engine(path, given, kv_bytes=few * block_bytes, max_batch_tokens=96, max_running=40) as llm:
        crowded, cached = told(_by_priority(llm, asked))
        preemptions = llm.stats().preemptions
        found["in chunks of 96, short of blocks"] = {
            "same": _same(alone, crowded), "cached_tokens": cached, "preemptions": preemptions
        }  # fmt: skip
    return found


def _compare_family(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.gpu_check import without_timing
    from benchmarks.gpu_families import make

    if given.backend == "cuda":
        without_timing()
    try:
        path = make(name, folder, given.models)
        _write_tokenizer(path)
        return compare(path, given)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def _write_tokenizer(path: Path) -> None:
    """A word for every id of a folder's model, which has none."""
    from tokenizers import Tokenizer, models

    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    size = (config.get("text_config") or config)["vocab_size"]
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0")).save(str(path / "tokenizer.json"))


def _by_priority(llm: kvarn.LLM, asked: Sequence[Request]) -> list[Any]:
    """Submit all, the more urgent ones while the others run."""
    handles = []
    for index, (ids, params) in enumerate(asked):
        handles.append(llm.submit(ids, replace(params, priority=index // 8)))
        time.sleep(0.05 if index % 8 == 7 else 0)
    return handles


def _same(wanted: Sequence[Answer], found: Sequence[Answer]) -> str:
    equal = sum(one == other for one, other in zip(wanted, found, strict=True))
    return f"{equal} of {len(wanted)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--shape", action="append", default=[])
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--models", type=Path, help="where tiny models lie, by family; others are made")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--kv-dtype", default=None)
    parser.add_argument("--kv-bytes", type=int, default=12 << 30)
    parser.add_argument("--vocabulary", type=int, default=49_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.context, found = FAMILY_CONTEXT if given.family else CONTEXT, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in given.family:
            found[name] = _compare_family(name, Path(folder), given)
            print(name, found[name], flush=True)
        for shape in given.shape:
            write_model(Path(folder) / f"{shape}.gguf", shape, "BF16")
        for path in [*given.model, *(Path(folder) / f"{shape}.gguf" for shape in given.shape)]:
            found[path.stem] = compare(path, given)
            print(path.stem, found[path.stem], flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
