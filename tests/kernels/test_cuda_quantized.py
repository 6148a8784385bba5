"""Products with packed matrices by the kernels for NVIDIA GPUs, interpreted on the CPU, against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvarn.formats.weights import TensorType
from tests.kernels.interpreted import interpreted

torch = pytest.importorskip("torch")
products = interpreted("quantized.products")

from kvarn.backends.torch.cuda.matmul import Epilogue  # noqa: E402
from kvarn.backends.torch.cuda.quantized.pack import PACKINGS, pack, pack_float8  # noqa: E402
from kvarn.backends.torch.dequantize import dequantize  # noqa: E402
from tests.parity.test_torch_packing import _stored  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS, DEPTH = 24, 1024 + 512 + 256  # two pieces, the second not whole, and columns that no tile divides
TILINGS = (
    products.PackedTiling(16, 16, 2, 1),
    products.PackedTiling(8, 32, 2, 2, 1),
)


@pytest.mark.parametrize("type", list(PACKINGS), ids=lambda t: t.name)
def test_products_are_those_of_the_values_and_pieces_may_be_shared(type: TensorType) -> None:
    matrix, values = _matrix(type)
    x = torch.randn(9, values.shape[1], generator=torch.Generator().manual_seed(1))
    wanted = x.double() @ values.double().T
    scratch = products.PieceSums.new(torch.device("cpu"))
    for tiling in TILINGS:
        out = torch.full((9, COLUMNS), float("nan"))
        products.multiply_packed(x, matrix, out, Epilogue.STORE, tiling, scratch)
        assert float((out - wanted).norm() / wanted.norm()) < 1e-6
    assert not scratch.finished.any()
    out = products.multiply_values(x, values, torch.full((9, COLUMNS), float("nan")), Epilogue.STORE)
    assert float((out - wanted).norm() / wanted.norm()) < 1e-6


def test_products_of_matrices_in_fp8_are_those_of_their_values() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (COLUMNS, DEPTH), dtype=torch.uint8, generator=generator)
    codes[(codes & 127) == 127] = 0x80
    scales = torch.rand((COLUMNS, DEPTH // 32), generator=generator) * 0.01
    matrix = pack_float8(codes, scales)
    dense = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(32, dim=1)
    values = products.values(matrix, torch.float32)  # rounded towards zero where kernels are interpreted
    assert float((values - dense).abs().max() / dense.abs().max()) < 0.01
    assert float((values - dense).norm() / dense.norm()) < 0.005
    x = torch.randn(9, DEPTH, generator=generator)
    wanted, scratch = x.double() @ values.double().T, products.PieceSums.new(torch.device("cpu"))
    for tiling in TILINGS:
        out = torch.full((9, COLUMNS), float("nan"))
        products.multiply_packed(x, matrix, out, Epilogue.STORE, tiling, scratch)
        assert float((out - wanted).norm() / wanted.norm()) < 1e-6


@pytest.mark.parametrize("epilogue", [Epilogue.ADD, Epilogue.SILU_GATED], ids=lambda e: e.name)
def test_a_product_is_added_or_gated(epilogue: Epilogue) -> None:
    matrix, values = _matrix(TensorType.Q4_K)
    x = torch.randn(3, DEPTH, generator=torch.Generator().manual_seed(2))
    product = x.double() @ values.double().T
    held = torch.randn(3, COLUMNS)
    gate, up = product.chunk(2, dim=1)
    wanted = held + product if epilogue is Epilogue.ADD else torch.nn.functional.silu(gate) * up
    out = held if epilogue is Epilogue.ADD else torch.empty(wanted.shape)
    scratch = products.PieceSums.new(torch.device("cpu"))
    products.multiply_packed(x, matrix, out, epilogue, products.PackedTiling(8, 16, 2, 1), scratch)
    assert float((out - wanted).norm() / wanted.norm()) < 1e-6


def test_rows_are_looked_up() -> None:
    matrix, values = _matrix(TensorType.Q6_K)
    ids = torch.tensor([23, 0, 7, 7])
    out = products.write_values(matrix, torch.empty(4, DEPTH), ids=ids)
    assert torch.equal(out, values[ids])


def test_scratch_memory_that_does_not_suffice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, _ = _matrix(TensorType.Q4_0)
    monkeypatch.setattr(products, "NUM_SUMS", 500)
    tiling = TILINGS[1]
    assert not tiling.fits(matrix, Epilogue.STORE, 9)
    with pytest.raises(ValueError, match="scratch memory"):
        products.multiply_packed(
            torch.zeros(9, DEPTH), matrix, torch.empty(9, COLUMNS), Epilogue.STORE, tiling,
            products.PieceSums.new(torch.device("cpu")),
        )  # fmt: skip


def _matrix(type: TensorType) -> tuple[object, Tensor]:
    """A packed matrix and its values, which are near the dequantised ones."""
    raw = _stored(type, COLUMNS * DEPTH)
    matrix = pack(raw, type, (COLUMNS, DEPTH))
    values = products.values(matrix, torch.float32)
    dense = dequantize(raw, type, (COLUMNS, DEPTH), torch.float32)
    assert float((values - dense).norm() / dense.norm()) < 0.004
    return matrix, values
