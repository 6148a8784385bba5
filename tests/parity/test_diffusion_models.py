"""The reference backend against a torch model of masked diffusion written here from the papers' descriptions.

LLaDA 2's experts follow modeling_llada2_moe.py of inclusionAI/LLaDA2.0-mini (the dFactory repository has the same).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from kvarn.backends.reference.backend import ReferenceBackend
from kvarn.formats.open import open_weights
from kvarn.models.describe import describe
from kvarn.models.spec import MaskedDiffusion
from tests.diffusion_models import BLOCK_LENGTH, BLOCKS, CONFIGS, DIFFUSION, MASK_ID, diffusion_tensors, tiny_diffusion
from tests.running import all_logits, layout_of, scattered_table
from tests.tiny_models import VOCAB

torch = pytest.importorskip("torch")

IDS = [int(i) for i in np.random.default_rng(2).integers(3, VOCAB, 26)] + [MASK_ID] * 7
TOLERANCE = 1e-4


class TorchModel:
    """Pre-norm blocks, rotation by halves, a mask that is all ones or ones up to the end of a query's block."""

    def __init__(self, arch: str, **changes: Any) -> None:
        self.config: dict[str, Any] = CONFIGS[arch] | changes
        self.weights = {name: torch.tensor(values) for name, values in diffusion_tensors(arch, self.config).items()}

    def logits(self, ids: list[int]) -> npt.NDArray[np.float32]:
        x = self.weights["model.embed_tokens.weight"][torch.tensor(ids)]
        for layer in range(self.config["num_hidden_layers"]):
            stem = f"model.layers.{layer}."
            x = x + self.attend(stem + "self_attn.", self.norm(stem + "input_layernorm", x))
            x = x + self.feed(stem + "mlp.", self.norm(stem + "post_attention_layernorm", x))
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return (self.norm("model.norm", x) @ head.T).numpy()

    def norm(self, name: str, x: Any) -> Any:
        rms = torch.sqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x / rms * self.weights[f"{name}.weight"]

    def heads(self, stem: str, name: str, x: Any, count: int) -> Any:
        """(heads, tokens, head_dim)"""
        y = x @ self.weights[f"{stem}{name}_proj.weight"].T + self.weights.get(f"{stem}{name}_proj.bias", 0)
        y = y.reshape(len(x), count, -1)
        y = self.norm(f"{stem}{name}_norm", y) if f"{stem}{name}_norm.weight" in self.weights else y
        return y.transpose(0, 1)

    def rotate(self, x: Any) -> Any:
        dims = int(x.shape[-1] * self.config.get("partial_rotary_factor", 1.0))
        return torch.cat([self.rotate_all(x[..., :dims]), x[..., dims:]], -1)

    def rotate_all(self, x: Any) -> Any:
        half = x.shape[-1] // 2
        angles = torch.outer(torch.arange(x.shape[1]), self.config["rope_theta"] ** (-torch.arange(half) / half))
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def attend(self, stem: str, x: Any) -> Any:
        num_heads, num_kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q = self.rotate(self.heads(stem, "q", x, num_heads))
        k, v = self.rotate(self.heads(stem, "k", x, num_kv_heads)), self.heads(stem, "v", x, num_kv_heads)
        k, v = (y.repeat_interleave(num_heads // num_kv_heads, dim=0) for y in (k, v))
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        block = torch.arange(len(x)) // self.config.get("block_size", len(x))
        scores = scores.masked_fill(block[None, :] > block[:, None], float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
        return mixed @ self.weights[f"{stem}o_proj.weight"].T + self.weights.get(f"{stem}o_proj.bias", 0)

    def feed(self, stem: str, x: Any) -> Any:
        if f"{stem}gate.weight" not in self.weights:
            return self.expert(stem, x)
        if "score_function" in self.config:
            return self.expert(f"{stem}shared_experts.", x) + self.grouped(stem, x)
        shares = (x @ self.weights[f"{stem}gate.weight"].T).softmax(-1)
        rows = []
        for row, share in zip(x, shares, strict=True):
            best = share.topk(self.config["num_experts_per_tok"])  # not renormalised
            parts = zip(best.indices.tolist(), best.values, strict=True)
            rows.append(sum(p * self.expert(f"{stem}experts.{e}.", row) for e, p in parts))
        return torch.stack(rows)

    def grouped(self, stem: str, x: Any) -> Any:
        """A group is worth its two best experts, by score and bias; the best experts of the best groups are used."""
        scores = (x @ self.weights[f"{stem}gate.weight"].T).sigmoid()
        worth = (scores + self.weights[f"{stem}gate.expert_bias"]).reshape(len(x), self.config["n_group"], -1)
        kept = worth.topk(2).values.sum(-1).topk(self.config["topk_group"]).indices
        is_kept = torch.zeros(worth.shape[:2], dtype=torch.bool).scatter(1, kept, True)
        worth = worth.masked_fill(~is_kept[:, :, None], float("-inf")).flatten(1)
        chosen = worth.topk(self.config["num_experts_per_tok"]).indices
        shares = scores.gather(1, chosen)
        shares = shares / shares.sum(-1, keepdim=True) if chosen.shape[1] > 1 else shares
        weights = torch.zeros_like(scores).scatter(1, chosen, shares * self.config["routed_scaling_factor"])
        return sum(weights[:, [e]] * self.expert(f"{stem}experts.{e}.", x) for e in range(self.config["num_experts"]))

    def expert(self, stem: str, x: Any) -> Any:
        gate, up, down = (self.weights[f"{stem}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize("arch", DIFFUSION)
def test_logits_of_a_canvas_agree(arch: str, format: Literal["safetensors", "gguf"], tmp_path: Path) -> None:
    expected = TorchModel(arch).logits(IDS)
    assert np.std(expected) > 0.1  # the random model says something
    described = describe(open_weights(tiny_diffusion(arch, tmp_path, format)))
    backend = ReferenceBackend()
    backend.load(described.spec, described.weights)
    layout = layout_of(described.spec, block_size=4)
    backend.reserve_kv(layout, 16 * layout.block_bytes)
    found = all_logits(backend, scattered_table(16, 9), IDS, (len(IDS),))
    assert np.abs(found - expected).max() <= TOLERANCE


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_generation_is_described(format: Literal["safetensors", "gguf"], tmp_path: Path) -> None:
    found = {arch: describe(open_weights(tiny_diffusion(arch, tmp_path, format))).spec for arch in DIFFUSION}
    whole = MaskedDiffusion(MASK_ID, shift=False, block=None)
    assert found["llada"].generation == found["llada-moe"].generation == found["llada-tied"].generation == whole
    assert found["dream"].generation == MaskedDiffusion(MASK_ID, shift=True, block=None)
    assert found["sdar"].generation == MaskedDiffusion(MASK_ID, shift=False, block=BLOCK_LENGTH)
    assert found["llada2"].generation == found["sdar"].generation
    assert found["dream-blocks"].generation == MaskedDiffusion(MASK_ID, shift=True, block=BLOCK_LENGTH)
    masks = {arch: spec.blocks[0].attention.mask for arch, spec in found.items()}
    assert masks == {arch: "block_causal" if arch in BLOCKS else "bidirectional" for arch in DIFFUSION}
