"""GLM-4.5 in shapes that its keys allow and nobody publishes: run as transformers runs them, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvarn.errors import FormatError
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from kvarn.models.spec import FeedForward
from tests.family_gguf import family_gguf
from tests.family_variants import Models, ours
from tests.parity.test_families import IDS, TOLERANCE
from tests.tiny_families import torch, transformers
from tests.unit.models.edited import Edited


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("groups"))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"topk_group": 1}, "topk_group"),  # 2 experts for the 3 that a token meets
        ({"topk_group": 5}, "topk_group"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 8, "topk_group": 8}, "n_group"),  # groups are judged by their two best experts
    ],
)
def test_groups_without_enough_experts_are_refused_by_name(changes: dict[str, Any], name: str, models: Models) -> None:
    with pytest.raises(FormatError, match=name):
        describe(open_weights(models.changed("glm4_moe", changes)))


@pytest.mark.parametrize("num_draft", [5, 6, 64])
def test_a_model_of_draft_layers_only_is_refused_by_name(num_draft: int, models: Models) -> None:
    path = family_gguf(models.base("glm4_moe"))  # 4 layers and one that drafts
    with pytest.raises(FormatError, match="nextn_predict_layers"):
        describe(Edited(open_weights(path), {"glm4moe.nextn_predict_layers": num_draft}))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [("glm4_moe", "first_k_dense_replace", 9), ("qwen2_moe", "mlp_only_layers", [0, 1, 2, 3])],
)
def test_all_layers_may_be_dense(family: str, key: str, value: Any, models: Models, tmp_path: Any) -> None:
    config = transformers.AutoConfig.from_pretrained(models.changed(family, {key: value}))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(tmp_path)
    spec = describe(open_weights(tmp_path)).spec
    assert all(isinstance(block.feed_forward, FeedForward) for block in spec.blocks)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    found = ours(tmp_path)
    assert found is not None
    assert np.abs(found - expected).max() <= TOLERANCE
