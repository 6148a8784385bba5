"""What is refused of an adapter's files, and by which name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvarn.adapters.files import open_adapter
from kvarn.adapters.weights import LoraWeights
from kvarn.errors import DoesNotFit, FormatError, KvarnError, ModelNotFound, UnsupportedModel
from kvarn.formats.gguf.writer import write_gguf
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from kvarn.models.spec import ModelSpec
from tests.lora_files import CONFIG, random_pairs, write_gguf_adapter, write_peft
from tests.tiny_models import CONFIGS, random_tensors, tiny_model

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    folder = tmp_path_factory.mktemp("bases")
    return {arch: spec_of(tiny_model(arch, folder)) for arch in ("llama", "qwen2", "qwen3moe", "bert")}


def spec_of(path: Path) -> ModelSpec:
    source = open_weights(path)
    try:
        return describe(source).spec
    finally:
        source.close()


def llama_pairs() -> Any:
    return random_pairs(random_tensors("llama", CONFIGS["llama"]), ("q_proj",))


def fitted(path: Path, spec: ModelSpec) -> LoraWeights:
    return open_adapter(path).fit(spec)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"use_velora_2030": {"x": 1}}, "use_velora_2030"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"rank_pattern": {"(a+)+b": 3}}, "rank_pattern"),
    ],
)
def test_a_field_that_changes_the_arithmetic_is_refused_by_name(
    config: dict[str, Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=name) as caught:
        open_adapter(write_peft(tmp_path / "adapter", llama_pairs(), **config))
    assert name in caught.value.fields


def test_unknown_fields_without_a_value_are_let_through(tmp_path: Path, specs: dict[str, ModelSpec]) -> None:
    folder = write_peft(tmp_path / "adapter", llama_pairs(), use_velora_2030=False, corda_config=None)
    assert fitted(folder, specs["llama"]).pairs


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"r": 0}, "r is 0"),
        ({"r": 5}, "rank 4"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "six"}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"use_rslora": 1}, "use_rslora"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=words):
        open_adapter(write_peft(tmp_path / "adapter", llama_pairs(), **config))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({f"{Q}.lora_A.weight": np.zeros((4, 64))}, "lacks one half"),
        ({}, "no pairs"),
        ({"model.embed_tokens.weight": np.zeros((4, 64))}, "added tokens"),
        ({f"{Q}.lora_magnitude_vector": np.zeros(64)}, "DoRA"),
        ({f"{Q}.lora_A.weight": np.zeros(4), f"{Q}.lora_B.weight": np.zeros((64, 4))}, "half of a pair is a matrix"),
        ({f"{Q}.lora_A.weight": np.zeros((4, 64)), f"{Q}.lora_A.default.weight": np.zeros((4, 64))}, "the same half"),
    ],
)
def test_tensors_that_are_no_pairs_are_refused(tensors: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "adapter", llama_pairs())
    found = {f"base_model.model.{name}": values.astype(np.float32) for name, values in tensors.items()}
    save_file(found, folder / "adapter_model.safetensors")
    with pytest.raises((FormatError, UnsupportedModel), match=words):
        open_adapter(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_refused(value: float, tmp_path: Path, specs: dict[str, ModelSpec]) -> None:
    pairs = llama_pairs()
    pairs[Q][1][3, 2] = value
    with pytest.raises(FormatError, match="NaN or infinity"):
        fitted(write_peft(tmp_path / "adapter", pairs), specs["llama"])


def test_an_adapter_of_another_base_is_refused_with_both_shapes(tmp_path: Path, specs: dict[str, ModelSpec]) -> None:
    pairs = {Q: (np.zeros((4, 128), np.float32), np.zeros((64, 4), np.float32))}
    with pytest.raises(FormatError, match=r"\(4, 128\).*another base"):
        fitted(write_peft(tmp_path / "adapter", pairs), specs["llama"])
    beyond = {Q.replace("layers.0", "layers.7"): llama_pairs()[Q]}
    with pytest.raises(UnsupportedModel, match=r"blk\.7\.attn_q"):
        fitted(write_peft(tmp_path / "beyond", beyond), specs["llama"])
    unknown = {"model.layers.0.self_attn.c_attn": llama_pairs()[Q]}
    with pytest.raises(UnsupportedModel, match="c_attn"):
        fitted(write_peft(tmp_path / "unknown", unknown), specs["llama"])


def test_experts_are_refused_by_name(tmp_path: Path, specs: dict[str, ModelSpec]) -> None:
    pairs = {"model.layers.0.mlp.experts.3.up_proj": (np.zeros((4, 64), np.float32), np.zeros((32, 4), np.float32))}
    with pytest.raises(UnsupportedModel, match=r"experts\.3\.up_proj"):
        fitted(write_peft(tmp_path / "adapter", pairs), specs["qwen3moe"])


def test_an_encoder_has_no_adapters(tmp_path: Path, specs: dict[str, ModelSpec]) -> None:
    with pytest.raises(UnsupportedModel):
        fitted(write_peft(tmp_path / "adapter", llama_pairs()), specs["bert"])


def test_a_gguf_adapter_names_its_architecture(tmp_path: Path, specs: dict[str, ModelSpec]) -> None:
    path = write_gguf_adapter(tmp_path / "a.gguf", CONFIGS["llama"], "llama", llama_pairs())
    assert open_adapter(path).description.base == "Tiny"
    with pytest.raises(UnsupportedModel, match=r"llama.*Qwen2"):
        fitted(path, specs["qwen2"])


@pytest.mark.parametrize("change", [{"general.type": "model"}, {"adapter.type": "ia3"}, {"adapter.lora.alpha": "x"}])
def test_a_gguf_file_that_is_no_lora_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    facts = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    facts |= {"adapter.lora.alpha": 6.0} | change
    pair = {f"blk.0.attn_q.weight.lora_{half}": np.zeros((4, 64), np.float32) for half in "ab"}
    write_gguf(tmp_path / "a.gguf", facts, pair)
    with pytest.raises(KvarnError, match=next(iter(change)).replace(".", r"\.")):
        open_adapter(tmp_path / "a.gguf")


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="not here"):
        open_adapter(tmp_path / "nothing")
    with pytest.raises(ModelNotFound, match=r"adapter_config\.json"):
        open_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelNotFound, match="pickle"):
        open_adapter(tmp_path)


def test_a_damaged_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "adapter", llama_pairs())
    whole = (folder / "adapter_model.safetensors").read_bytes()
    for end in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        (folder / "adapter_model.safetensors").write_bytes(whole[:end])
        with pytest.raises(FormatError):
            open_adapter(folder)


def test_the_bases_own_embedding_beside_its_pair_is_left_out(tmp_path: Path) -> None:
    """PEFT writes it whenever the embedding or the head is among the targets."""
    folder = write_peft(tmp_path / "adapter", llama_pairs())
    tensors, base = load_file(folder / "adapter_model.safetensors"), np.ones((64, 64), np.float32)
    save_file(tensors | {f"base_model.model.{Q}.base_layer.weight": base}, folder / "adapter_model.safetensors")
    assert [one.name for one in open_adapter(folder).pairs] == list(llama_pairs())
    save_file(tensors | {"base_model.model.lm_head.base_layer.weight": base}, folder / "adapter_model.safetensors")
    with pytest.raises(UnsupportedModel, match="lm_head"):
        open_adapter(folder)
    save_file(tensors | {f"base_model.model.{Q}.base_layer.weight": base[1:]}, folder / "adapter_model.safetensors")
    with pytest.raises(FormatError, match="its pair changes one of"):
        open_adapter(folder)


def test_an_adapter_of_more_bytes_than_there_are_is_refused_before_it_is_read(tmp_path: Path) -> None:
    name, columns = f"base_model.model.{Q}", 1 << 30
    ends = (0, 16 * columns, 16 * columns + 64)
    parts = {"A": [4, columns], "B": [4, 4]}
    header = {
        f"{name}.lora_{part}.weight": {"dtype": "F32", "shape": shape, "data_offsets": ends[index : index + 2]}
        for index, (part, shape) in enumerate(parts.items())
    }
    data = json.dumps(header).encode()
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    with (tmp_path / "adapter_model.safetensors").open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(8 + len(data) + ends[-1])  # without blocks: it takes no room on the disk
    with pytest.raises(DoesNotFit, match="lora_bytes"):
        open_adapter(tmp_path, max_bytes=1 << 30)
