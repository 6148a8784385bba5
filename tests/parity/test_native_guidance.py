"""Tokens of masked positions: guidance, repeated draws, margins and entropies, in a bounded memory for logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.batch import NO_TOKEN, RowSampling, Sampled, SampleRows
from kvarn.backends.native import _native
from kvarn.backends.native.backend import NativeBackend
from kvarn.backends.protocol import Backend
from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.formats.quants import quantize
from kvarn.formats.weights import TensorInfo, TensorType
from kvarn.models.spec import Attention, Autoregressive, Block, FeedForward, Head, InputEmbedding, ModelSpec, Norm
from kvarn.models.tensors.shapes import expected_tensors

WIDTH = 32
VOCAB = 1300  # not a whole number of pieces
ROUNDING = 5e-5  # of logits of size 20, where guidance multiplies the difference of two of them
Float32 = npt.NDArray[np.float32]


class HeadOnly:
    """Weights of a model that is used for its head alone."""

    path = "head"
    metadata: Mapping[str, Any] = {}

    def __init__(self, spec: ModelSpec, type: TensorType) -> None:
        self._type = type
        self.tensors = {
            name: TensorInfo(name, type if len(shape) > 1 else TensorType.F32, tuple(int(n or 1) for n in shape))
            for name, shape in expected_tensors(spec).items()
        }

    def array(self, name: str) -> Float32:
        shape = self.tensors[name].shape
        if name != "token_embd.weight":
            return np.zeros(shape, np.float32)
        return np.random.default_rng(1).normal(0, 0.6, shape).astype(np.float32)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return quantize(self.array(name), self.tensors[name].type)

    def release_pages(self, names: Iterable[str]) -> None: ...

    def verify_unchanged(self) -> None: ...

    def close(self) -> None: ...


def head_model(backend: Backend, vocab: int = VOCAB, softcap: float | None = None) -> Backend:
    attention = Attention(num_heads=1, num_kv_heads=1, head_dim=WIDTH, scale=1.0, rope=None)
    block = Block(attention, FeedForward(WIDTH, "silu"), Norm("rms", 1e-5))
    head, rest = Head(True, softcap), (None, Autoregressive())
    spec = ModelSpec("test", "head", WIDTH, vocab, 64, InputEmbedding(), (block,), rest[0], head, rest[1])
    backend.load(spec, HeadOnly(spec, TensorType.F32))
    return backend


@pytest.fixture(params=_native.isa_names())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def states(count: int, seed: int = 5) -> Float32:
    return np.random.default_rng(seed).normal(0, 1, (count, WIDTH)).astype(np.float32)


def rows_of(count: int, *, guided: bool, **fields: Any) -> SampleRows:
    """Every third row has a partner in the second half of the states."""
    rng = np.random.default_rng(3)
    params = tuple(RowSampling(seed=int(rng.integers(2**63)), position=i, **fields) for i in range(count))
    partners = np.where(np.arange(count) % 3 == 0, np.arange(count) + count, -1).astype(np.int32) if guided else None
    return SampleRows(np.arange(count, dtype=np.int32), params, num_top=2, want_logprobs=True, partners=partners)


def same(ours: Sampled, defined: Sampled) -> None:
    np.testing.assert_array_equal(ours.token_ids, defined.token_ids)
    np.testing.assert_array_equal(ours.top_ids, defined.top_ids)
    np.testing.assert_allclose(ours.logprobs, defined.logprobs, atol=ROUNDING)
    np.testing.assert_allclose(ours.top_logprobs, defined.top_logprobs, atol=ROUNDING)
    np.testing.assert_allclose(ours.entropy, defined.entropy, atol=ROUNDING)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_choices_equal_the_definition(guided: bool, softcap: float | None, temperature: float, isa: str) -> None:
    rows = rows_of(75, guided=guided, temperature=temperature, cfg_scale=1.5)
    backends = (NativeBackend(2, isa), ReferenceBackend())
    same(*(head_model(backend, softcap=softcap).sample(states(150), rows) for backend in backends))


@pytest.mark.parametrize("guided", [False, True])
def test_biases_move_the_choice_and_not_its_probability(guided: bool, isa: str) -> None:
    """As the mask token is banned, and one of the likely tokens of every row with it."""
    native, reference = head_model(NativeBackend(2, isa)), head_model(ReferenceBackend())
    rows = rows_of(40, guided=guided, cfg_scale=0.5)
    likely = reference.sample(states(80), rows)
    biased = tuple(
        replace(
            params,
            bias_ids=np.array([ids[0], 700, 1299, ids[1]], np.int32),
            bias_values=np.array([-1e9, 3.0, 0.5, -1.0], np.float32),
        )
        for params, ids in zip(rows.params, likely.top_ids, strict=True)
    )
    ours, defined = (backend.sample(states(80), replace(rows, params=biased)) for backend in (native, reference))
    same(ours, defined)
    np.testing.assert_array_equal(ours.top_ids, likely.top_ids)
    assert (ours.token_ids != likely.token_ids).all()


def test_guidance_changes_the_choice() -> None:
    backend = head_model(NativeBackend(1))
    plain, guided = (backend.sample(states(150), rows_of(75, guided=g, cfg_scale=2.0)) for g in (False, True))
    changed = plain.token_ids != guided.token_ids
    assert changed[::3].any()
    assert not changed[1::3].any()


def test_every_draw_at_a_position_is_another_one() -> None:
    backends = [head_model(backend) for backend in (NativeBackend(1), ReferenceBackend())]
    found = []
    for draw in range(4):
        rows = rows_of(20, guided=False, temperature=1.5, draw=draw)
        ours, defined = (backend.sample(states(20), rows).token_ids.tolist() for backend in backends)
        assert ours == defined
        found.append(tuple(ours))
    assert len(set(found)) == 4


def test_a_row_depends_on_no_neighbour_and_no_thread(isa: str) -> None:
    rows = rows_of(75, guided=True, cfg_scale=0.7)
    whole = head_model(NativeBackend(2, isa)).sample(states(150), rows)
    alone = head_model(NativeBackend(1, isa))
    for i in range(75):
        assert rows.partners is not None
        one = replace(rows, rows=rows.rows[i : i + 1], params=rows.params[i : i + 1], partners=rows.partners[i : i + 1])
        found = alone.sample(states(150), one)
        for name in ("token_ids", "logprobs", "entropy", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(found, name)[0], getattr(whole, name)[i])


def test_equal_logits_go_to_the_lower_id(isa: str) -> None:
    backend = head_model(NativeBackend(2, isa))
    sampled = backend.sample(np.zeros((2, WIDTH), np.float32), rows_of(2, guided=False))
    assert sampled.token_ids.tolist() == [0, 0]
    assert sampled.top_ids.tolist() == [[0, 1], [0, 1]]
    np.testing.assert_allclose(sampled.entropy, np.log(VOCAB), rtol=1e-6)
    np.testing.assert_allclose(sampled.logprobs, -np.log(VOCAB), rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_damaged_partner_gives_no_token(temperature: float) -> None:
    hidden = states(4)
    hidden[3, 5] = np.nan
    rows = replace(
        rows_of(2, guided=False, temperature=temperature, cfg_scale=1.0), partners=np.array([-1, 3], np.int32)
    )
    for backend in (NativeBackend(1), ReferenceBackend()):
        token_ids = head_model(backend).sample(hidden, rows).token_ids
        assert token_ids[0] != NO_TOKEN
        assert token_ids[1] == NO_TOKEN


@pytest.mark.parametrize("field", ["rows", "partners"])
def test_rows_that_are_not_there_are_refused(field: str) -> None:
    rows = replace(rows_of(2, guided=True), **{field: np.array([0, 4], np.int32)})
    with pytest.raises(ValueError, match="outside the hidden states"):
        head_model(NativeBackend(1)).sample(states(4), rows)


def test_a_block_of_a_large_vocabulary_needs_a_twentieth_of_its_logits() -> None:
    """32 rows of 126,464 tokens, as text diffusion asks for them: the issue is memory, so the width may be small."""
    vocab = 126_464
    backend = NativeBackend(2)
    head_model(backend, vocab)
    backend.sample(states(32), rows_of(32, guided=False))
    assert 0 < backend.logit_bytes <= 32 * vocab * 4 / 20
