"""Prune a tenth of a model's layers away here, heal it on a machine with a GPU, judge it there and here.

    python -m benchmarks.prune_heal prepare MODEL --text FILE --train FILE --held-out FILE --work FOLDER [--keep 0.9]
    python -m benchmarks.prune_heal heal --work FOLDER --out FOLDER [--minutes 6]
    python -m benchmarks.prune_heal finish MODEL --held-out FILE --work FOLDER --out FOLDER
    python -m benchmarks.prune_heal file MODEL --text FILE --held-out FILE --work FOLDER [--minutes 6] [--chunks 16]

`heal` needs torch alone, no native core: what `kvarn prune --heal` runs, with the same defaults. Between the machines
travel source.gguf.partN, student.gguf.partN and ids.npz there, figures.json and healed/healed.gguf.partN (Q8_0, 97 MiB
in all for SmolLM2, which stay in the folder there, so that several transfers can bring them) back.
Perplexities of `heal` are of float32 weights, second halves of 512 tokens; `finish` measures the file with the
native backend and writes benchmarks/results/prune-heal-NAME.json. `file` is the whole way on one machine: the file of
`kvarn prune --heal --then Q8_0` and the one without healing, both judged by the native backend; it writes
prune-heal-file-NAME.json.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from kvarn.pruning.heal import CONTEXT, Healing, HealOptions, heal_chunks

SHARED = "token_embd.weight"  # the student's embedding is the source's: it does not travel twice
PART_BYTES = {"source.gguf": 50 << 20, "student.gguf": 56 << 20, "healed.gguf": 15 << 20}
JUDGED_CHUNKS, WATCH_SECONDS = 64, 15.0


def main() -> None:
    """One of the three stages, or the whole way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("prepare", "heal", "finish", "file"))
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--text", type=Path, help="to choose by")
    parser.add_argument("--train", type=Path, help="to learn from")
    parser.add_argument("--held-out", type=Path, help="to judge by")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=float, default=0.9)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rate", type=float, help="how far a step goes, where not as usual")
    parser.add_argument("--chunks", type=int, default=JUDGED_CHUNKS)
    arguments = parser.parse_args()
    {"prepare": prepare, "heal": heal, "finish": finish, "file": whole_way}[arguments.stage](arguments)


def prepare(arguments: argparse.Namespace) -> None:
    """Prune, unhealed and unrounded; encode the texts; cut both models into parts."""
    import kvarn
    from kvarn.evaluation.text import cut_chunks, read_text
    from kvarn.pruning.prune import PruneJob
    from kvarn.quantization.source import open_source
    from kvarn.tokenizer.from_gguf import tokenizer_from_gguf

    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    started = time.process_time()
    options = kvarn.PruneOptions(text=arguments.text, then="F16", requantize=True)
    source = open_source(arguments.model)
    job = PruneJob(arguments.model, source, kvarn.PruneTarget(keep=arguments.keep), options, None)
    with job.planner(work) as planner:
        shape = job.target.choose(planner)
        _, weights = job.cut(planner, shape)
        tensors = {
            name: Stored(info.type, info.shape, weights.raw(name))
            for name, info in weights.tensors.items()
            if name != SHARED
        }
        write_gguf(work / "student.gguf", {**source.metadata(), **weights.hyperparameters}, tensors)
        told = {"shape": asdict(shape), "trials": [{**asdict(t.shape), "kl": t.kl} for t in planner.trials]}
    tokenizer = tokenizer_from_gguf(GGUFFile(arguments.model).metadata)
    train = heal_chunks(read_text(arguments.train), tokenizer)
    held_out = cut_chunks(read_text(arguments.held_out), tokenizer, CONTEXT, arguments.chunks).ids
    small = np.uint16 if max(train.max(), held_out.max()) < 1 << 16 else np.int32
    np.savez_compressed(work / "ids.npz", train=train.astype(small), held_out=held_out.astype(small))
    told |= {"keep": arguments.keep, "cpu_seconds": time.process_time() - started, "train_tokens": int(train.size)}
    (work / "prepared.json").write_text(json.dumps(told))
    shutil.copyfile(arguments.model, work / "source.gguf")
    for name in ("source.gguf", "student.gguf"):
        _split(work / name, work)
    print(json.dumps(told))


def heal(arguments: argparse.Namespace) -> None:
    """Distil with torch, watching the held-out text; write the healed weights of the layers as Q8_0."""
    work, out = arguments.work, arguments.out
    out.mkdir(parents=True, exist_ok=True)
    source = GGUFFile(_join(work / "source.gguf"))
    student = _with_embedding(_join(work / "student.gguf"), source, work / "whole.gguf")
    with np.load(work / "ids.npz") as ids:
        train, held_out = ids["train"].astype(np.int32), ids["held_out"][: arguments.chunks].astype(np.int32)
    healing = Healing(
        source, describe(source).spec, train, HealOptions(arguments.minutes, arguments.steps, 18, arguments.rate)
    )
    run = healing.distillation(student, describe(student).spec)
    figures: dict[str, Any] = {"source": _perplexity(run.teacher, held_out)}
    figures["pruned"] = _perplexity(run.student, held_out)
    print(f"source {figures['source']:.3f}, pruned {figures['pruned']:.3f}", flush=True)
    figures["curve"] = curve = []
    done = run.run(_watch(lambda: _perplexity(run.student, held_out[:16]), run.losses, curve))
    figures["healed"] = _perplexity(run.student, held_out)
    figures["ratio"] = {name: figures[name] / figures["source"] for name in ("pruned", "healed")}
    figures |= {"device": done.device, "steps": len(done.losses), "num_tokens": done.num_tokens}
    figures |= {"seconds": done.seconds, "scored_tokens": len(held_out) * (CONTEXT // 2 - 1)}
    (out / "figures.json").write_text(json.dumps(figures))
    print(json.dumps(figures), flush=True)
    _write_healed(student, done.weights, work / "healed")


def finish(arguments: argparse.Namespace) -> None:
    """The figures of both machines as one file; where the healed weights came back, measured here, too."""
    from tests.results import write_result

    work, out = arguments.work, arguments.out
    figures = json.loads((work / "prepared.json").read_text())
    figures |= {"gpu": json.loads((out / "figures.json").read_text()), "native": None}
    if (out / "healed.gguf.part0").exists():
        figures["native"] = _measured_natively(arguments)
    write_result(f"prune-heal-{arguments.model.stem}", figures, command="python -m benchmarks.prune_heal")
    print(json.dumps(figures))


def whole_way(arguments: argparse.Namespace) -> None:
    """The written files, healed and not, judged as any file is."""
    from tests.results import write_result

    import kvarn
    from kvarn.evaluation.evaluate import evaluate_all

    work, target = arguments.work, kvarn.PruneTarget(keep=arguments.keep)
    work.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {"keep": arguments.keep, "minutes": arguments.minutes}
    for name, minutes in (("pruned", None), ("healed", arguments.minutes)):
        options = kvarn.PruneOptions(
            text=arguments.text, then="Q8_0", heal_minutes=minutes, requantize=True, force=True
        )
        started = time.process_time()
        report = kvarn.prune(arguments.model, target, work / f"{name}-file.gguf", options=options)
        figures[name] = {"cpu_seconds": time.process_time() - started, "shape": asdict(report.after.shape)}
        if report.healing is not None:
            figures["healing"] = asdict(report.healing)
    files = [work / f"{name}-file.gguf" for name in ("pruned", "healed")]
    judged = kvarn.EvaluationOptions(chunks=arguments.chunks)
    own, *reports = evaluate_all(files, text=arguments.held_out, against=arguments.model, options=judged)
    figures["source"] = own.as_dict()
    for name, one in zip(("pruned", "healed"), reports, strict=True):
        figures[name] |= one.as_dict() | {"ratio": one.perplexity / own.perplexity}
    command = f"python -m benchmarks.prune_heal file {arguments.model.name} --minutes {arguments.minutes:g}"
    write_result(f"prune-heal-file-{arguments.model.stem}", figures, command=command)
    print(json.dumps(figures))


def _measured_natively(arguments: argparse.Namespace) -> dict[str, float]:
    import kvarn

    healed = arguments.work / "healed.gguf"
    parts = _join(arguments.out / "healed.gguf", arguments.work / "healed-layers.gguf")
    _with_embedding(parts, GGUFFile(arguments.model), healed).close()
    options = kvarn.EvaluationOptions(chunks=arguments.chunks)
    own = kvarn.evaluate(arguments.model, text=arguments.held_out, options=options)
    found = kvarn.evaluate(healed, text=arguments.held_out, against=arguments.model, options=options)
    assert found.divergence is not None
    ratio = found.perplexity / own.perplexity
    return {"source": own.perplexity, "healed": found.perplexity, "ratio": ratio, "kl": found.divergence.kl_mean}


def _watch(
    judge: Callable[[], float], losses: list[float], curve: list[dict[str, float]]
) -> Callable[[int, int | None], None]:
    started = last = time.perf_counter()

    def watch(steps: int, _total: int | None) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last < WATCH_SECONDS and steps != 1:
            return
        last = now
        some = float(np.mean(losses[-50:]))
        curve.append({"seconds": now - started, "steps": steps, "kl": some, "perplexity": judge()})
        print(
            f"{now - started:6.1f} s, {steps} steps, KL {some:.4f}, perplexity {curve[-1]['perplexity']:.3f}",
            flush=True,
        )

    return watch


def _perplexity(model: Any, ids: npt.NDArray[np.int32]) -> float:
    """In float32, of the second half of each sequence, as `kvarn evaluate` scores it."""
    import torch

    losses, first = [], CONTEXT // 2
    with torch.no_grad():
        for at in range(0, len(ids), 8):
            some = torch.from_numpy(ids[at : at + 8]).long().to(model.device)
            logits = model.logits(model.hidden(some)[:, first:-1])
            targets = some[:, first + 1 :].flatten()
            losses.append(len(some) * float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)))
    return math.exp(sum(losses) / len(ids))


def _write_healed(student: GGUFFile, weights: Mapping[str, npt.NDArray[np.float32]], out: Path) -> None:
    def stored(name: str) -> Stored:
        return Stored.quantized(weights[name], TensorType.F32 if weights[name].ndim == 1 else TensorType.Q8_0)

    out.mkdir(exist_ok=True)
    metadata = {**student.stored_metadata(), "general.file_type": 7}
    write_gguf(out / "healed.gguf", metadata, {name: stored(name) for name in student.tensors if name != SHARED})
    _split(out / "healed.gguf", out)
    (out / "healed.gguf").unlink()


def _with_embedding(layers: Path, source: GGUFFile, path: Path) -> GGUFFile:
    """The file of a model's layers with the source's embedding."""
    opened, shared = GGUFFile(layers), source.tensors[SHARED]
    tensors = {SHARED: Stored(shared.type, shared.shape, source.raw(SHARED))}
    tensors |= {name: Stored(info.type, info.shape, opened.raw(name)) for name, info in opened.tensors.items()}
    write_gguf(path, dict(opened.stored_metadata()), tensors)
    return GGUFFile(path)


def _split(path: Path, folder: Path) -> None:
    data = path.read_bytes()
    size = PART_BYTES[path.name]
    for number, at in enumerate(range(0, len(data), size)):
        (folder / f"{path.name}.part{number}").write_bytes(data[at : at + size])


def _join(path: Path, target: Path | None = None) -> Path:
    target = target or path
    if target != path or not path.exists():
        target.write_bytes(b"".join(part.read_bytes() for part in _parts(path)))
    return target


def _parts(path: Path) -> Iterator[Path]:
    found = sorted(path.parent.glob(f"{path.name}.part*"))
    if not found:
        raise SystemExit(f"{path}: no parts are there")
    yield from found


if __name__ == "__main__":
    main()
