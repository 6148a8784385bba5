"""Adapters, speculation and the prefix cache on disk at once change no more bytes than each of them: none."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvarn import EngineConfig
from kvarn.adapters.pool import AdapterPool
from kvarn.decoding.speculation.draft_length import Always
from kvarn.engine.load import LoadedModel, load_model
from kvarn.request import Request
from kvarn.submissions import Submissions
from tests.chat_model import HEADS, LAYERS, write_chat_model, write_draft_layer_model
from tests.conftest import Size
from tests.lora_files import chat_model_pairs, write_gguf_adapter
from tests.parity.test_speculation import KINDS, LENGTH, PREDICTION, PROMPT, bytes_of, run

NAMES = ("greedy", "temperature 1", "penalties", "JSON schema", "stop strings")
LORAS = (None, "first", "second")
WORK = [(name, lora) for name in NAMES for lora in LORAS]
PREFIX = PROMPT * 2  # with what is said about it: five blocks of 16 tokens
GGUF_CONFIG = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
Bytes = tuple[Any, ...]


class Process:
    """What a process is to the folder: a model with adapters, loaded and closed."""

    def __init__(self, path: Path, speculation: str, folder: Path | None, **options: Any) -> None:
        unpaced = {"max_stretch": 1e3, "prefill_ms": 1e6, "threads": 1, "context": 512, "kv_bytes": 16 << 20}
        config = EngineConfig(speculation=speculation, prefix_cache_dir=folder and str(folder), **unpaced, **options)
        self.model: LoadedModel = load_model(path, config)
        self.engine = self.model.engine
        pool = AdapterPool(self.model.spec, self.model.backend, 1 << 30)
        for name in filter(None, LORAS):
            pool.load(path.with_name(f"{name}.gguf"), name)
        self._words = Submissions(self.model.tokenizer, self.model.spec, pool)
        if (speculating := self.engine.decoder.speculation) is not None:
            speculating.length = Always()
        if (disk := self.engine.scheduler.prefix_reuse.disk) is not None:
            while disk._parts is None:  # until the weights are hashed
                time.sleep(0.001)

    def submit(self, name: str, lora: str | None) -> Request:
        params = KINDS[name].replace(max_tokens=LENGTH, logprobs=2, prediction=PREDICTION)
        ids = self.model.tokenizer.encode(f"{PREFIX}{name}")
        return self.engine.submit(self._words.of_ids(ids, params, tenant="one", lora=lora))[0]

    def alone(self) -> list[Bytes]:
        """One after the other."""
        return [bytes_of(run(self.engine, [self.submit(*one)])[0]) for one in WORK]

    def together(self, preempts: random.Random | None) -> list[Bytes]:
        return [bytes_of(one) for one in run(self.engine, [self.submit(*one) for one in WORK], preempts)]

    def close(self) -> tuple[int, int]:
        """Tokens that came from disk, and drafts that were right."""
        stats = self.engine.stats()
        self.model.close()
        return stats.disk.hit_tokens, sum(stats.accepted_per_position)


@pytest.fixture(scope="module", params=["auto,suffix", "mtp"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Sequence[Bytes]]:
    """Drafters, a model for them, and its answers with nothing but adapters."""
    path, has_layer = tmp_path_factory.mktemp("model") / "model.gguf", request.param == "mtp"
    write_draft_layer_model(path, is_near=True) if has_layer else write_chat_model(path)
    for seed, name in enumerate(filter(None, LORAS)):
        pairs = {part: pair for part, pair in chat_model_pairs(seed).items() if "layers.0" in part}
        arch = "glm4moe" if has_layer else "llama"
        write_gguf_adapter(path.with_name(f"{name}.gguf"), GGUF_CONFIG, arch, pairs)
    plain = Process(path, "off", None, prefix_cache=False)
    expected = plain.alone()
    plain.close()
    assert len(set(expected)) >= 2 * len(NAMES), "the adapters say something else"
    return request.param, path, expected


def test_cold_warm_and_restored_answers_on_adapters_with_drafts_are_the_plain_ones(
    case: tuple[str, Path, Sequence[Bytes]], tmp_path: Path, size: Size
) -> None:
    drafters, path, expected = case
    first = Process(path, drafters, tmp_path)
    assert [first.alone(), first.alone()] == [expected, expected]
    num_restored, num_accepted = first.close()
    assert num_restored == 0
    assert num_accepted > 5
    for seed in range(size(2, 12)):
        process = Process(path, drafters, tmp_path, max_batch_tokens=random.Random(seed).choice([24, 512]))
        assert process.together(random.Random(seed) if seed % 2 else None) == expected
        num_restored, num_accepted = process.close()
        assert num_restored >= 64 * len(LORAS)  # blocks of each adapter, and of none
        assert num_accepted > 5
