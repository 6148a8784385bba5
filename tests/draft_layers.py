"""Tiny models with a layer that predicts further tokens, and what transformers' own layers make of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.tiny_families import family_folder, randomise

torch = pytest.importorskip("torch")

Float32 = npt.NDArray[np.float32]


# Of the layers in files, what they are called in the class.
HY_V3 = {"mlp.router.gate.weight": "mlp.gate.weight", "mlp.expert_bias": "mlp.e_score_correction_bias"}
HY_V3 |= {
    f"mlp.shared_mlp.{part}_proj.weight": f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")
}


class DraftLayerOracle:
    """A family's model with such a layer: the family's own decoder layer behind norms and a matrix."""

    def __init__(self, family: str, shape: int, folder: Path) -> None:
        self.model, self.path = family_folder(family, shape, folder)
        config, width = self.model.config, self.model.config.hidden_size
        self.layer = copy.deepcopy(self.model.model.layers[-1])
        self.parts = torch.nn.ModuleDict(
            {
                "enorm": torch.nn.RMSNorm(width, config.rms_norm_eps),
                "hnorm": torch.nn.RMSNorm(width, config.rms_norm_eps),
                "eh_proj": torch.nn.Linear(2 * width, width, bias=False),
                "shared_head_norm": torch.nn.RMSNorm(width, config.rms_norm_eps),
            }
        )
        for seed, module in enumerate((self.layer, self.parts)):
            module.config = config
            randomise(module, seed=31 + seed)
        self._save(config.num_hidden_layers)

    def states(self, ids: Sequence[int]) -> Float32:
        """The model's states after its output norm."""
        with torch.no_grad():
            return self.model.model(torch.tensor([ids])).last_hidden_state[0].numpy()

    def logits(self, ids: Sequence[int]) -> Float32:
        """What the layer says about the token after the next, for every position but the last."""
        model, parts = self.model.model, self.parts
        with torch.no_grad():
            states, tokens = model(torch.tensor([ids])).last_hidden_state[:, :-1], torch.tensor([ids[1:]])
            embedded = parts["enorm"](model.embed_tokens(tokens))
            x = parts["eh_proj"](torch.cat([embedded, parts["hnorm"](states)], dim=-1))
            positions = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
            turned = model.rotary_emb(x, position_ids=positions)
            found = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=turned)
            found = found[0] if isinstance(found, tuple) else found
            return self.model.lm_head(parts["shared_head_norm"](found))[0].numpy()

    def _save(self, number: int) -> None:
        from safetensors.numpy import load_file, save_file

        file, stem = self.path / "model.safetensors", f"model.layers.{number}."
        tensors: dict[str, Any] = load_file(file)
        last = f"model.layers.{number - 1}."
        mine = {name: values.numpy() for name, values in self.layer.state_dict().items()}
        # As the folder has the last layer's: experts may be stored together or one by one.
        for name in [name for name in tensors if name.startswith(last)]:
            tensors[stem + name.removeprefix(last)] = _stored_as(name.removeprefix(last), mine)
        last_norm = "final_layernorm" if self.model.config.model_type == "hy_v3" else "shared_head.norm"
        for name, values in self.parts.state_dict().items():
            tensors[stem + name.replace("shared_head_norm", last_norm)] = values.numpy()
        tensors[f"{stem}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors[f"{stem}shared_head.head.weight"] = tensors["lm_head.weight"].copy()
        save_file(tensors, file)
        config = json.loads((self.path / "config.json").read_text())
        (self.path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def _stored_as(name: str, mine: dict[str, Any]) -> Any:
    """A tensor of a layer under the name that the file has for it."""
    name = HY_V3.get(name, name)
    if name in mine:
        return np.ascontiguousarray(mine[name])
    stem, _, rest = name.partition("experts.")
    number, matrix = rest.removesuffix(".weight").split(".")
    if matrix == "down_proj":
        return np.ascontiguousarray(mine[f"{stem}experts.down_proj"][int(number)])
    gate, up = np.split(mine[f"{stem}experts.gate_up_proj"][int(number)], 2)
    return np.ascontiguousarray(gate if matrix == "gate_proj" else up)
