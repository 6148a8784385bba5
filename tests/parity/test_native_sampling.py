"""The native and the torch choice of tokens against their definition, on rows of logits we choose ourselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.batch import NO_TOKEN, RowSampling, Sampled, SampleRows, Scored
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.formats.weights import TensorInfo, TensorType
from kvarn.models.spec import Attention, Autoregressive, Block, FeedForward, Head, InputEmbedding, ModelSpec, Norm
from tests.torch_backend import torch_cpu

VOCAB = 96


class IdentityHead:
    """Weights of a model whose head is the identity: its hidden states are its logits."""

    path = "identity"
    metadata: Mapping[str, Any] = {}

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.tensors = {name: TensorInfo(name, TensorType.F32, shape) for name, shape in shapes.items()}

    def array(self, name: str) -> npt.NDArray[np.float32]:
        shape = self.tensors[name].shape
        return np.eye(VOCAB, dtype=np.float32) if name == "token_embd.weight" else np.zeros(shape, np.float32)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self.array(name).reshape(-1).view(np.uint8)

    def release_pages(self, names: Iterable[str]) -> None: ...

    def verify_unchanged(self) -> None: ...

    def close(self) -> None: ...


def _identity() -> tuple[ModelSpec, IdentityHead]:
    attention = Attention(num_heads=1, num_kv_heads=1, head_dim=32, scale=1.0, rope=None)
    block = Block(attention, FeedForward(32, "silu"), Norm("rms", 1e-5))
    spec = ModelSpec(
        "test", "identity", VOCAB, VOCAB, 64, InputEmbedding(), (block,), None, Head(True), Autoregressive()
    )
    square, narrow = (32, VOCAB), (VOCAB, 32)
    layer = {"attn_q": square, "attn_k": square, "attn_v": square, "attn_output": narrow}
    layer |= {"ffn_gate": square, "ffn_up": square, "ffn_down": narrow, "attn_norm": (VOCAB,), "ffn_norm": (VOCAB,)}
    shapes = {f"blk.0.{name}.weight": shape for name, shape in layer.items()}
    return spec, IdentityHead(shapes | {"token_embd.weight": (VOCAB, VOCAB)})


class TorchSampler:
    """The torch backend, which takes its hidden states as tensors."""

    def __init__(self) -> None:
        self._backend = torch_cpu()
        self._backend.load(*_identity())

    def sample(self, logits: npt.NDArray[np.float32], rows: SampleRows) -> Sampled:
        return self._backend.sample(self._tensor(logits), rows)

    def score(self, logits: npt.NDArray[np.float32], targets: npt.NDArray[np.int32], num_top: int) -> Scored:
        return self._backend.score(self._tensor(logits), targets, num_top)

    def _tensor(self, values: npt.NDArray[np.float32]) -> Any:
        import torch

        return torch.from_numpy(values)


Backends = tuple[NativeBackend | TorchSampler, ReferenceBackend]


@pytest.fixture(scope="module", params=["native", "torch"])
def backends(request: pytest.FixtureRequest) -> Backends:
    native, reference = NativeBackend(2), ReferenceBackend()
    for backend in (native, reference):
        backend.load(*_identity())
    return (native if request.param == "native" else TorchSampler()), reference


def _rows(rng: np.random.Generator, count: int, **fixed: Any) -> SampleRows:
    seen = rng.choice(VOCAB, 12, replace=False).astype(np.int32)
    params = [
        RowSampling(
            **{"temperature": float(rng.uniform(0.2, 2.0)), "seed": int(rng.integers(2**63)), "position": i} | fixed,
            bias_ids=seen[:3].copy(),
            bias_values=rng.normal(0, 2, 3).astype(np.float32),
            seen_ids=seen,
            seen_counts=rng.integers(0, 4, 12).astype(np.int32),
        )
        for i in range(count)
    ]
    return SampleRows(np.arange(count, dtype=np.int32), tuple(params), num_top=5, want_logprobs=True)


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 500},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.7},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95},
        {"top_p": 0.0},
        {"xtc_probability": 0.5},
        {"xtc_probability": 1.0, "xtc_threshold": 0.02},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0},
        {"xtc_probability": 0.7, "xtc_threshold": 0.01, "top_k": 9},
        {"xtc_probability": 0.7, "xtc_threshold": 0.05, "top_p": 0.9},
        {"xtc_probability": 0.7, "xtc_threshold": 0.05, "min_p": 0.05},
        {"xtc_probability": 0.7, "xtc_threshold": 0.05, "typical_p": 0.8, "min_p": 0.02},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05, "temperature": 0.0},
        {"temperature": 1e-39},
        {"temperature": 1e-38, "typical_p": 0.9},
        {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": -0.3},
    ],
    ids=str,
)
def test_choices_equal_the_definition(backends: Backends, filters: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 3, (200, VOCAB)).astype(np.float32)
    rows = _rows(rng, 200, **filters)
    ours, defined = (backend.sample(logits, rows) for backend in backends)
    np.testing.assert_array_equal(ours.token_ids, defined.token_ids)
    np.testing.assert_array_equal(ours.top_ids, defined.top_ids)
    np.testing.assert_allclose(ours.logprobs, defined.logprobs, atol=2e-6)
    np.testing.assert_allclose(ours.top_logprobs, defined.top_logprobs, atol=2e-6)
    np.testing.assert_allclose(ours.entropy, defined.entropy, atol=2e-6)


def test_scores_equal_the_definition(backends: Backends) -> None:
    rng = np.random.default_rng(8)
    logits = rng.normal(0, 3, (100, VOCAB)).astype(np.float32)
    targets = rng.integers(0, VOCAB, 100).astype(np.int32)
    ours, defined = (backend.score(logits, targets, 3) for backend in backends)
    np.testing.assert_allclose(ours.logprobs, defined.logprobs, atol=2e-6)
    np.testing.assert_array_equal(ours.top_ids, defined.top_ids)


def test_a_choice_does_not_depend_on_its_neighbours(backends: Backends) -> None:
    native, rng = backends[0], np.random.default_rng(9)
    logits = rng.normal(0, 1, (64, VOCAB)).astype(np.float32)
    rows = _rows(rng, 64, top_p=0.9)
    together = native.sample(logits, rows)
    for i in range(64):
        alone = native.sample(logits, SampleRows(rows.rows[i : i + 1], rows.params[i : i + 1], 5, True))
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_only_rows_whose_logits_are_not_finite_get_no_token(backends: Backends) -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[1, 5] = np.nan
    rows = _rows(np.random.default_rng(0), 2)
    for backend in backends:
        sampled = backend.sample(logits, rows)
        assert sampled.token_ids[0] >= 0
        assert sampled.token_ids[1] == NO_TOKEN


def test_rows_with_and_without_bias_and_penalties_stand_side_by_side(
    backends: Backends,
) -> None:
    rng = np.random.default_rng(11)
    logits = rng.normal(0, 3, (40, VOCAB)).astype(np.float32)
    full = _rows(rng, 40, repetition_penalty=1.3).params
    plain = [RowSampling(temperature=1.0, seed=i, position=i, choice=i) for i in range(40)]
    mixed = tuple(full[i] if i % 3 == 0 else plain[i] for i in range(40))
    rows = SampleRows(np.arange(40, dtype=np.int32), mixed)
    ours, defined = (backend.sample(logits, rows) for backend in backends)
    np.testing.assert_array_equal(ours.token_ids, defined.token_ids)


@pytest.mark.parametrize("field", ["bias_ids", "seen_ids"])
def test_ids_outside_the_vocabulary_are_refused(backends: Backends, field: str) -> None:
    values = {"bias_ids": "bias_values", "seen_ids": "seen_counts"}[field]
    kind = np.float32 if field == "bias_ids" else np.int32
    for token in (-1, VOCAB):
        given = {field: np.array([token], np.int32), values: np.ones(1, kind)}
        row = RowSampling(repetition_penalty=1.1, **given)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="vocabulary"):
            backends[0].sample(np.zeros((1, VOCAB), np.float32), SampleRows(np.zeros(1, np.int32), (row,)))


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 7},
        {"top_k": 500},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.7},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 500},
        {"xtc_probability": 0.7, "xtc_threshold": 0.05, "typical_p": 0.8, "min_p": 0.02},
        {"temperature": 1e-38, "typical_p": 0.9},
        {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": -0.3},
    ],
    ids=str,
)
def test_masked_choices_equal_the_definition(backends: Backends, filters: dict[str, Any]) -> None:
    rng = np.random.default_rng(13)
    logits = rng.normal(0, 3, (200, VOCAB)).astype(np.float32)
    rows = _rows(rng, 200, **filters)
    allowed = rng.random((200, VOCAB)) < rng.random((200, 1)) ** 3
    allowed[np.arange(200), rng.integers(0, VOCAB, 200)] = True
    masks = np.packbits(allowed, axis=1, bitorder="little").view("<u4")
    # Every third row has no mask: rows with and without one stand side by side.
    params = tuple(row if i % 3 == 0 else replace(row, mask=masks[i]) for i, row in enumerate(rows.params))
    ours, defined = (backend.sample(logits, replace(rows, params=params)) for backend in backends)
    np.testing.assert_array_equal(ours.token_ids, defined.token_ids)
    assert all(allowed[i, ours.token_ids[i]] for i in range(200) if i % 3)
    # Log-probabilities are those of the model, whatever was allowed.
    np.testing.assert_allclose(ours.logprobs, defined.logprobs, atol=2e-6)
    np.testing.assert_array_equal(ours.top_ids, backends[0].sample(logits, rows).top_ids)


def test_a_mask_without_a_bit_gives_no_token(backends: Backends) -> None:
    empty = np.zeros(VOCAB // 32, np.uint32)
    rows = _rows(np.random.default_rng(0), 2)
    params = (replace(rows.params[0], mask=empty), rows.params[1])
    for backend in backends:
        sampled = backend.sample(np.zeros((2, VOCAB), np.float32), replace(rows, params=params))
        assert sampled.token_ids[0] == NO_TOKEN
        assert sampled.token_ids[1] >= 0


def test_a_mask_of_the_wrong_size_is_refused(backends: Backends) -> None:
    row = RowSampling(mask=np.ones(VOCAB // 32 + 1, np.uint32))
    with pytest.raises(ValueError, match="mask"):
        backends[0].sample(np.zeros((1, VOCAB), np.float32), SampleRows(np.zeros(1, np.int32), (row,)))
