"""llama.cpp loads what we write and predicts the same, where llama-cpp-python is installed: `make test-long` does that.

Short form: a tiny model in every type, by every method and without every kind of part. Long form: SmolLM2. Where both
are further apart than roundings usually put them, both are held against the exact arithmetic, and that is recorded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import kvarn
from kvarn.evaluation.text import RunningText, read_text
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from kvarn.pruning.report import PruningReport
from kvarn.quantization.recipes import MIXES
from tests.chat_model import chat_metadata
from tests.conftest import Record
from tests.float_model import write_float_model, write_text
from tests.float_source import float_source
from tests.llama_cpp_agreement import agreement, from_exact
from tests.parity.test_size_beside_mix import texts
from tests.unit.quantization.test_storage_only import types

pytestmark = pytest.mark.model

# Both round what a matrix reads to 8 bits, each in its own way (docs/quality.md); floats differ by their sums alone.
MAX_KL = {"F32": 1e-4, "F16": 1e-4, "BF16": 1e-3}
MAX_KL_ROUNDED = 0.01
MAX_KL_INEXACT = 0.03


@pytest.fixture(scope="module")
def llama_cpp() -> Any:
    return pytest.importorskip("llama_cpp")


@pytest.fixture(scope="module")
def bench(is_long: bool, llama_cpp: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    calibration, _ = texts(folder, is_long=is_long)
    source = float_source("smollm2") if is_long else write_float_model(folder / "s.gguf", hidden=512, **one_merge())
    return Bench(llama_cpp, folder, source, calibration, 256 if is_long else 64)


def one_merge() -> dict[str, Any]:
    """Metadata of a tokeniser with a merge: llama.cpp refuses an empty list of them."""
    metadata = chat_metadata()
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    changed = {"tokens": [*tokens[:-1], "th"], "token_type": [*types[:-1], 1], "merges": ["t h"]}
    return {f"tokenizer.ggml.{key}": value for key, value in changed.items()}


@dataclass(frozen=True, slots=True)
class Bench:
    """A source, what it is calibrated with, and how many tokens are compared."""

    llama_cpp: Any
    folder: Path
    source: Path
    calibration: Path
    num_tokens: int

    def quantized(self, target: str | kvarn.SizeTarget, **options: Any) -> dict[str, float]:
        """KL(ours || theirs) on a quantised file, over one chunk of random words."""
        model = self.folder / "out.gguf"
        kvarn.quantize(self.source, target, model, options=kvarn.QuantizeOptions(force=True, **options))
        return self.compare(model, limit_of(target))

    def cut(
        self, source: Path, target: kvarn.PruneTarget, then: str, own: float = 0.0
    ) -> tuple[PruningReport, dict[str, float]]:
        """The same on a pruned file; own: KL of the source."""
        model = self.folder / "cut.gguf"
        options = kvarn.PruneOptions(text=self.calibration, then=None if then == "F16" else then, force=True)
        report = kvarn.prune(source, target, model, options=options)
        found = self.compare(model, limit_of(then) + own)
        return report, found | asdict(report.after.shape) | {"kl_source": own}

    def compare(self, model: Path, limit: float = 1.0) -> dict[str, float]:
        """The same on a file; beyond the limit also how far both readers are from the exact arithmetic on it."""
        found = agreement(self.llama_cpp, model, self._text(), self.num_tokens)
        if found["kl_mean"] <= limit:
            return found
        return found | from_exact(self.llama_cpp, model, self._text(), self.num_tokens)

    def _text(self) -> RunningText:
        return read_text(write_text(self.folder / "compared.txt", seed=7))


def limit_of(target: str | kvarn.SizeTarget) -> float:
    return MAX_KL.get(target, MAX_KL_ROUNDED) if isinstance(target, str) else MAX_KL_ROUNDED


def agrees(found: dict[str, float], limit: float) -> bool:
    """Whether two readers of the same weights are near each other, or no further apart than both are from exactness.

    The largest input of SmolLM2's ffn_down is 3,600 times that of the median channel (layer 11). Before K-quants
    llama.cpp rounds 256 of them by one scale, we 32: it is up to four times as far from the exact result as we are.
    """
    if found["kl_mean"] <= limit:
        return True
    ours, theirs = found["kl_ours_from_exact"], found["kl_theirs_from_exact"]
    return found["kl_mean"] <= 1.1 * (ours + theirs) and ours <= min(theirs, MAX_KL_INEXACT)


def test_every_type(bench: Bench, record: Record) -> None:
    found = {mix: bench.quantized(mix) for mix in MIXES}
    record("llama-cpp-reads-types", found)
    assert not [mix for mix, figures in found.items() if not agrees(figures, limit_of(mix))]


def test_experts_in_mxfp4(bench: Bench, record: Record) -> None:
    """What MXFP4_MOE is for: of a model without experts it makes Q8_0."""
    source = write_float_model(bench.folder / "experts.gguf", num_experts=4, **one_merge())
    found = replace(bench, source=source).quantized("MXFP4_MOE")
    record("llama-cpp-reads-experts", found)
    assert types(bench.folder / "out.gguf")["blk.5.ffn_down_exps.weight"] == "MXFP4"
    assert agrees(found, MAX_KL_ROUNDED)


def test_every_method(bench: Bench, record: Record) -> None:
    matrix = bench.folder / "imatrix"
    few = kvarn.ImatrixOptions(chunks=8, context=bench.num_tokens, force=True)
    kvarn.collect_imatrix(bench.source, matrix, text=bench.calibration, options=few)
    found = {
        "rtn": bench.quantized("Q4_K_M", method="rtn"),
        "imatrix": bench.quantized("Q4_K_M", imatrix=matrix),
        "size": bench.quantized(kvarn.SizeTarget(bits_per_weight=5.5), imatrix=matrix, text=bench.calibration),
    }
    for method in ("gptq", "awq", "smoothquant"):
        found[method] = bench.quantized("Q4_K_M", method=method, imatrix=matrix, text=bench.calibration)
    record("llama-cpp-reads-methods", found)
    assert not [method for method, figures in found.items() if not agrees(figures, MAX_KL_ROUNDED)]


CUTS = {
    "layers": {"layers": 2},
    "channels": {"ffn": 0.25},
    "query-heads": {"heads": 0.5},
    "all": {"layers": 1, "ffn": 0.25, "heads": 0.5},
    "budget": {"keep": 0.8},
}
SMOLLM2_CUTS = CUTS | {"query-heads": {"heads": 1 / 3}, "all": {"layers": 1, "ffn": 0.1, "heads": 1 / 3}}


@pytest.mark.parametrize("then", ["F16", "Q4_K_M"])
@pytest.mark.parametrize("cut", list(CUTS))
def test_every_cut(bench: Bench, is_long: bool, cut: str, then: str, record: Record) -> None:
    parts = (SMOLLM2_CUTS if is_long else CUTS)[cut]
    _, found = bench.cut(bench.source, kvarn.PruneTarget(**parts), then)
    record(f"llama-cpp-reads-cut-{cut}-{then}", found)
    assert agrees(found, limit_of(then))


def test_kv_groups(bench: Bench, record: Record) -> None:
    """Groups of zeros, so that they and nothing else are what goes, and the model stays what it was.

    As F16 only: rounded to Q4_K_M this model is far from its exact arithmetic with either reader (KL 1.9 with ours, 2.9
    with llama.cpp's), and they say nothing about each other.
    """
    source, share = without_a_group(bench.source, bench.folder / "zeros.gguf")
    # SmolLM2 without a third of its heads magnifies the least difference: the uncut file says by how much.
    own = bench.compare(source)["kl_mean"]
    report, found = bench.cut(source, kvarn.PruneTarget(heads=share), "F16", own)
    record("llama-cpp-reads-cut-kv-groups-F16", found)
    assert agrees(found, limit_of("F16") + own)
    assert report.after.shape.kv_heads == report.before.shape.kv_heads - 1
    assert report.kl_unrounded == pytest.approx(0, abs=1e-6)


def without_a_group(source: Path, path: Path) -> tuple[Path, float]:
    """A model whose second KV group adds nothing, in every layer; and the share of the heads that is."""
    file = GGUFFile(source)
    attention = describe(file).spec.blocks[0].attention
    width = attention.head_dim * attention.num_heads // attention.num_kv_heads
    tensors = {name: Stored(info.type, info.shape, file.raw(name)) for name, info in file.tensors.items()}
    for name in (name for name in tensors if name.endswith("attn_output.weight")):
        values = file.array(name).copy()
        values[:, width : 2 * width] = 0
        tensors[name] = Stored.quantized(values, TensorType.F16)
    write_gguf(path, dict(file.stored_metadata()), tensors)
    return path, 1 / attention.num_kv_heads
