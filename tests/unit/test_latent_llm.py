"""A model with latent attention through the SDK: what works, and what is refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvarn
from kvarn import LLM, EngineConfig, SamplingParams
from kvarn.errors import ConfigError, UnsupportedModel
from kvarn.formats.gguf.writer import Stored, write_gguf
from kvarn.formats.weights import TensorType
from tests.chat_model import CONTEXT, CONTROLS, chat_metadata

WIDTH, HIDDEN, LAYERS, HEADS = 64, 96, 2, 4
QUERY_RANK, RANK, NOPE, ROPE, VALUE = 32, 32, 16, 8, 16
SIZES = {
    "embedding_length": WIDTH,
    "block_count": LAYERS,
    "feed_forward_length": HIDDEN,
    "context_length": CONTEXT,
    "attention.head_count": HEADS,
    "attention.q_lora_rank": QUERY_RANK,
    "attention.kv_lora_rank": RANK,
    "attention.key_length": NOPE + ROPE,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": ROPE,
    "rope.freq_base": 10000.0,
}
SHAPES = {
    "attn_norm.weight": (WIDTH,),
    "attn_q_a.weight": (QUERY_RANK, WIDTH),
    "attn_q_a_norm.weight": (QUERY_RANK,),
    "attn_q_b.weight": (HEADS * (NOPE + ROPE), QUERY_RANK),
    "attn_kv_a_mqa.weight": (RANK + ROPE, WIDTH),
    "attn_kv_a_norm.weight": (RANK,),
    "attn_kv_b.weight": (HEADS * (NOPE + VALUE), RANK),
    "attn_output.weight": (WIDTH, HEADS * VALUE),
    "ffn_norm.weight": (WIDTH,),
    "ffn_gate.weight": (HIDDEN, WIDTH),
    "ffn_up.weight": (HIDDEN, WIDTH),
    "ffn_down.weight": (WIDTH, HIDDEN),
}
STORY = "The mill stood by the river, and every morning the miller opened the gate. "
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=16, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, path = np.random.default_rng(3), tmp_path_factory.mktemp("latent") / "tiny.gguf"
    vocabulary = 256 + len(CONTROLS)
    shapes = {"token_embd.weight": (vocabulary, WIDTH), "output_norm.weight": (WIDTH,)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in SHAPES.items()}
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape)
        values = 1.0 + 0.1 * values if len(shape) == 1 else values * 1.5 / np.sqrt(shape[-1])
        tensors[name] = Stored.quantized(values.astype(np.float32), TensorType.F32)
    head = rng.standard_normal((vocabulary, WIDTH)).astype(np.float32) / 24  # so that several tokens are probable
    tensors["output.weight"] = Stored.quantized(head, TensorType.F32)
    kept = {key: value for key, value in chat_metadata().items() if not key.startswith("llama.")}
    sizes = {f"minicpm3.{key}": value for key, value in SIZES.items()}
    write_gguf(path, kept | {"general.architecture": "minicpm3", "general.name": "tiny latent"} | sizes, tensors)
    return path


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), context=512) as opened:
        yield opened


def test_answers_are_the_same_alone_together_and_from_the_cache(llm: LLM) -> None:
    prompts = [STORY * 2, STORY, STORY * 2 + "Then", "Once"]
    alone = [llm.generate(prompt, PARAMS.replace(reuse_cache=False)) for prompt in prompts]
    for _ in range(2):
        together = [handle.result(60) for handle in [llm.submit(prompt, PARAMS) for prompt in prompts]]
        assert [(one.token_ids, one.logprobs) for one in together] == [(one.token_ids, one.logprobs) for one in alone]
    assert together[0].usage.cached_tokens >= 128


def test_several_choices_share_the_prompt(llm: LLM) -> None:
    answer = llm.generate(STORY * 2, PARAMS.replace(n=3))
    assert len({answer.text, *(one.text for one in answer.alternatives)}) == 3


def test_a_cache_of_eight_bits_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="latent attention, whose cache is f16 or f32"):
        LLM(str(path), config=EngineConfig(context=512, kv_dtype="q8_0"))


def test_quantising_says_why_not(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="latent attention"):
        kvarn.quantize(path, "Q4_0", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
