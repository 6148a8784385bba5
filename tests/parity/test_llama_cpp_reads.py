"""llama.cpp loads what we write and predicts the same, where llama-cpp-python is installed: `make test-long` does that.

Short form: a tiny model in every type, by every method and without every kind of part. Long form: SmolLM2.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import kvarn
from kvarn.evaluation.text import read_text
from kvarn.formats.gguf.reader import GGUFFile
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType
from kvarn.models.describe import describe
from kvarn.quantization.recipes import MIXES
from tests.chat_model import chat_metadata
from tests.conftest import Record
from tests.float_model import write_float_model, write_text
from tests.float_source import float_source
from tests.llama_cpp_agreement import agreement
from tests.parity.test_size_beside_mix import texts

pytestmark = pytest.mark.model

# Both round what a matrix reads to 8 bits, each in its own way (docs/quality.md); floats differ by their sums alone.
MAX_KL = {"F32": 1e-4, "F16": 1e-4, "BF16": 1e-3}
MAX_KL_ROUNDED = 0.01


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
        return self.compare(model)

    def compare_cut(
        self, source: Path, target: kvarn.PruneTarget, then: str, own: float = 0.0
    ) -> tuple[kvarn.PruningReport, dict[str, Any]]:
        """Prune and compare; own: KL of the source."""
        model = self.folder / "cut.gguf"
        options = kvarn.PruneOptions(text=self.calibration, then=None if then == "F16" else then, force=True)
        report = kvarn.prune(source, target, model, options=options)
        found = self.compare(model) | asdict(report.after.shape) | {"kl_source": own}
        assert found["kl_mean"] <= MAX_KL.get(then, MAX_KL_ROUNDED) + own
        return report, found

    def compare(self, model: Path) -> dict[str, float]:
        """KL(ours || theirs) on a file."""
        text = read_text(write_text(self.folder / "compared.txt", seed=7))
        return agreement(self.llama_cpp, model, text, self.num_tokens)


def test_every_type(bench: Bench, record: Record) -> None:
    found = {mix: bench.quantized(mix) for mix, base in MIXES.items() if isinstance(base, TensorType) or mix == "MXFP4"}
    record("llama-cpp-reads-types", found)
    far = {mix: figures for mix, figures in found.items() if figures["kl_mean"] > MAX_KL.get(mix, MAX_KL_ROUNDED)}
    assert not far


def test_every_method(bench: Bench, record: Record) -> None:
    matrix = bench.folder / "imatrix"
    few = kvarn.ImatrixOptions(chunks=8, context=bench.num_tokens)
    kvarn.collect_imatrix(bench.source, matrix, text=bench.calibration, options=few)
    found = {
        "rtn": bench.quantized("Q4_K_M", method="rtn"),
        "imatrix": bench.quantized("Q4_K_M", imatrix=matrix),
        "size": bench.quantized(kvarn.SizeTarget(bits_per_weight=5.5), imatrix=matrix, text=bench.calibration),
    }
    for method in ("gptq", "awq", "smoothquant"):
        found[method] = bench.quantized("Q4_K_M", method=method, imatrix=matrix, text=bench.calibration)
    record("llama-cpp-reads-methods", found)
    assert max(figures["kl_mean"] for figures in found.values()) <= MAX_KL_ROUNDED


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
    _, found = bench.compare_cut(bench.source, kvarn.PruneTarget(**parts), then)
    record(f"llama-cpp-reads-cut-{cut}-{then}", found)


@pytest.mark.parametrize("then", ["F16", "Q4_K_M"])
def test_kv_groups(bench: Bench, then: str, record: Record) -> None:
    """Groups of zeros, so that they and nothing else are what goes, and the model stays what it was."""
    source, share = without_a_group(bench.source, bench.folder / "zeros.gguf")
    # SmolLM2 without a third of its heads magnifies the least difference: the uncut file says by how much.
    own = bench.compare(source)["kl_mean"]
    report, found = bench.compare_cut(source, kvarn.PruneTarget(heads=share), then, own)
    record(f"llama-cpp-reads-cut-kv-groups-{then}", found)
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
