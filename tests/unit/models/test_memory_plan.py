"""The memory plan: sizes, automatic context, and refusals with numbers and remedies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.fake import fake_spec
from kvarn.errors import ConfigError, DoesNotFit
from kvarn.formats.weights import TensorInfo, TensorType
from kvarn.machine import MemoryAvailable
from kvarn.models.cache_cost import windowed_layers
from kvarn.models.memory_plan import CACHE_TOKENS, kv_token_bytes, plan_memory, show_bytes
from kvarn.models.spec import Attention, ModelSpec

MIB = 1 << 20
ATTENTION = Attention(num_heads=8, num_kv_heads=4, head_dim=64, scale=1.0, rope=None)
SPEC = replace(
    fake_spec(vocab_size=1000, context_length=8192),
    blocks=(replace(fake_spec().blocks[0], mixer=ATTENTION),) * 8,
)
TOKEN_BYTES = 8 * 2 * 4 * 64 * 2


@dataclass(frozen=True)
class NamedTensors:
    """Tensors without data: a plan reads sizes only."""

    tensors: Mapping[str, TensorInfo]
    path: str = "nowhere"

    @property
    def metadata(self) -> Mapping[str, Any]:
        return {}

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        raise NotImplementedError

    def array(self, name: str) -> npt.NDArray[np.float32]:
        raise NotImplementedError

    def release_pages(self, names: Iterable[str]) -> None: ...

    def verify_unchanged(self) -> None: ...

    def close(self) -> None: ...


def weights(num_bytes: int) -> NamedTensors:
    rows = num_bytes // 4 // 1024
    return NamedTensors({"a": TensorInfo("a", TensorType.F32, (rows, 1024))})


def memory(num_bytes: int) -> MemoryAvailable:
    return MemoryAvailable(num_bytes, "free memory of the system")


def test_the_cache_holds_one_full_context_by_default() -> None:
    plan = plan_memory(SPEC, weights(100 * MIB), None, None, memory(4096 * MIB))
    assert kv_token_bytes(SPEC) == TOKEN_BYTES
    assert (plan.context, plan.kv_bytes, plan.note) == (8192, 8192 * TOKEN_BYTES, None)
    assert plan.weights_bytes == 100 * MIB


def test_a_short_context_leaves_room_for_several_requests() -> None:
    short = replace(SPEC, context_length=512)
    plan = plan_memory(short, weights(MIB), None, None, memory(4096 * MIB))
    assert (plan.context, plan.kv_bytes) == (512, CACHE_TOKENS * TOKEN_BYTES)


def test_a_given_context_sizes_the_cache() -> None:
    plan = plan_memory(SPEC, weights(MIB), 1000, None, memory(4096 * MIB))
    assert (plan.context, plan.kv_bytes) == (1000, 1000 * TOKEN_BYTES)


def test_given_kv_bytes_bound_the_context() -> None:
    plan = plan_memory(SPEC, weights(MIB), None, 100 * TOKEN_BYTES, memory(4096 * MIB))
    assert (plan.context, plan.kv_bytes) == (100, 100 * TOKEN_BYTES)
    assert plan.note is not None


def test_little_memory_reduces_the_context_and_says_so() -> None:
    plan = plan_memory(SPEC, weights(10 * MIB), None, None, memory(140 * MIB))
    assert 256 <= plan.context < 8192
    assert plan.needed_bytes <= 140 * MIB
    assert plan.note is not None
    assert "8,192" in plan.note


def test_a_context_that_does_not_fit_is_refused_with_the_numbers_and_a_smaller_one_that_does() -> None:
    with pytest.raises(DoesNotFit, match="set context=") as caught:
        plan_memory(SPEC, weights(10 * MIB), 8192, None, memory(140 * MIB))
    error = caught.value
    assert error.available_bytes == 140 * MIB
    assert error.needed_bytes > 140 * MIB
    for number in ("weights 10.0 MiB", "KV cache 64.0 MiB for 8,192 tokens", "140.0 MiB is available"):
        assert number in str(error)
    suggested = int(str(error).split("context=")[1].split()[0])
    assert plan_memory(SPEC, weights(10 * MIB), suggested, None, memory(140 * MIB)).context == suggested


def test_adapters_are_counted_and_named_in_a_refusal() -> None:
    plain = plan_memory(SPEC, weights(MIB), 1000, None, memory(4096 * MIB))
    beside = plan_memory(SPEC, weights(MIB), 1000, None, memory(4096 * MIB), lora_bytes=100 * MIB)
    assert beside.needed_bytes - plain.needed_bytes == beside.lora_bytes == 100 * MIB
    with pytest.raises(DoesNotFit, match=r"adapters 100.0 MiB \(lora_bytes\)"):
        plan_memory(SPEC, weights(MIB), 1000, None, memory(120 * MIB), lora_bytes=100 * MIB)


def test_a_cache_of_many_contexts_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(DoesNotFit, match="set kv_bytes=") as caught:
        plan_memory(SPEC, weights(10 * MIB), None, 1 << 40, memory(1000 * MIB))
    assert "context=" not in str(caught.value)
    suggested = int(str(caught.value).split("kv_bytes=")[1].split()[0])
    assert plan_memory(SPEC, weights(10 * MIB), None, suggested, memory(1000 * MIB)).context == 8192


def test_weights_that_do_not_fit_are_refused_with_a_smaller_quantisation() -> None:
    with pytest.raises(DoesNotFit, match="smaller quantisation") as caught:
        plan_memory(SPEC, weights(500 * MIB), None, None, memory(300 * MIB))
    assert "context=" not in str(caught.value)


def test_a_refusal_names_what_the_device_could_do_first() -> None:
    remedies = ['set kv_dtype="fp8"', "set tensor_parallel=2 (one GPU is here)"]
    with pytest.raises(DoesNotFit, match=r'set kv_dtype="fp8", or set tensor_parallel=2 .*, or use a smaller'):
        plan_memory(SPEC, weights(500 * MIB), None, None, memory(300 * MIB), remedies=remedies)


def test_larger_steps_need_more_scratch() -> None:
    small, large = (
        plan_memory(SPEC, weights(MIB), 1000, None, memory(4096 * MIB), step_rows=rows) for rows in (512, 2048)
    )
    assert large.scratch_bytes > 3 * small.scratch_bytes


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="8,192"):
        plan_memory(SPEC, weights(MIB), 8193, None, memory(4096 * MIB))


def test_kv_bytes_too_small_for_a_given_context_name_what_would_do() -> None:
    with pytest.raises(ConfigError, match=f"kv_bytes={100 * TOKEN_BYTES:,}"):
        plan_memory(SPEC, weights(MIB), 100, 99 * TOKEN_BYTES, memory(4096 * MIB))


def test_an_encoder_needs_room_for_its_batches_only() -> None:
    encoder = fake_spec(is_encoder=True)
    plan = plan_memory(encoder, weights(MIB), None, None, memory(4096 * MIB))
    assert plan.kv_bytes == 2 * 512 * kv_token_bytes(encoder)


@pytest.mark.parametrize(("num_bytes", "text"), [(5, "5 B"), (2048, "2 KiB"), (3 * MIB // 2, "1.5 MiB")])
def test_sizes_are_shown_in_binary_units(num_bytes: int, text: str) -> None:
    assert show_bytes(num_bytes) == text


# The shape of Gemma 3 270M: of 18 layers every sixth keeps all, the others 512 tokens.
WINDOWED = replace(
    fake_spec(vocab_size=1000, context_length=32_768),
    blocks=tuple(
        replace(
            fake_spec().blocks[0],
            mixer=Attention(4, 1, 256, scale=1.0, rope=None, window=None if layer % 6 == 5 else 512),
        )
        for layer in range(18)
    ),
)


def test_layers_with_windows_cost_a_third_of_the_cache_where_they_are_freed() -> None:
    kept, freed = (
        plan_memory(WINDOWED, weights(MIB), None, None, memory(4096 * MIB), window_step=step) for step in (None, 512)
    )
    assert kept.kv_bytes == 576 * MIB
    assert freed.kv_bytes <= 0.35 * kept.kv_bytes
    assert freed.context == kept.context == 32_768
    assert freed.cost.split(freed.kv_bytes, freed.context) == (32_768, 6_144)


def test_a_window_in_every_second_layer_halves_the_cache() -> None:
    """The layers of gpt-oss 20B."""
    windows = [None if layer % 2 else 128 for layer in range(24)]
    blocks = tuple(
        replace(fake_spec().blocks[0], mixer=Attention(64, 8, 64, scale=0.125, rope=None, window=window))
        for window in windows
    )
    spec = replace(WINDOWED, blocks=blocks)
    kept, freed = (
        plan_memory(spec, weights(MIB), None, None, memory(16_384 * MIB), window_step=step) for step in (None, 512)
    )
    assert kept.kv_bytes == 1536 * MIB
    assert freed.kv_bytes == 912 * MIB


def test_with_little_memory_windows_give_way_to_the_context() -> None:
    plan = plan_memory(WINDOWED, weights(MIB), None, None, memory(240 * MIB), window_step=512)
    assert plan.context == 32_768
    assert plan.kv_bytes < 150 * MIB
    tokens, window_tokens = plan.cost.split(plan.kv_bytes, plan.context)
    assert tokens == plan.context
    assert window_tokens >= plan.cost.least_window_tokens


def test_a_plan_given_back_as_settings_is_the_same_plan() -> None:
    for step in (None, 512):
        plan = plan_memory(WINDOWED, weights(MIB), None, None, memory(4096 * MIB), window_step=step)
        again = plan_memory(WINDOWED, weights(MIB), plan.context, plan.kv_bytes, memory(4096 * MIB), window_step=step)
        assert again == plan


def test_a_cache_of_many_contexts_holds_as_many_tokens_in_windows() -> None:
    plan = plan_memory(WINDOWED, weights(MIB), 4096, 1152 * MIB, memory(4096 * MIB), window_step=512)
    assert plan.cost.split(plan.kv_bytes, plan.context) == (65_536, 65_536)


def test_a_layer_whose_keys_another_reads_whole_keeps_all() -> None:
    blocks = list(WINDOWED.blocks)
    for reader, source in ((16, 2), (17, 3)):  # the second has no window
        blocks[reader] = replace(blocks[reader], mixer=replace(blocks[reader].attention, kv_source=source))
    assert [windowed_layers(replace(WINDOWED, blocks=tuple(blocks)))[layer] for layer in (2, 3)] == [True, False]


def test_windows_as_long_as_the_context_change_nothing() -> None:
    short = replace(WINDOWED, context_length=1024)
    plans = [plan_memory(short, weights(MIB), None, None, memory(4096 * MIB), window_step=s) for s in (None, 512)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("spec", [WINDOWED, replace(WINDOWED, blocks=WINDOWED.blocks[:5])], ids=["some", "all"])
def test_the_kv_bytes_that_a_refusal_names_are_accepted(spec: ModelSpec) -> None:
    for context in (300, 1151, 1152, 1153, 32_768):
        with pytest.raises(ConfigError, match="give kv_bytes=") as refused:
            plan_memory(spec, weights(MIB), context, MIB, memory(4096 * MIB), window_step=512)
        named = int(str(refused.value).split("give kv_bytes=")[1].split(" ")[0].replace(",", ""))
        for kv_bytes in (named, named + 1):
            plan = plan_memory(spec, weights(MIB), context, kv_bytes, memory(4096 * MIB), window_step=512)
            assert plan.context == context
