"""K-EXAONE: norms over each head of Q and K, rotation in windowed layers only, experts chosen by sigmoid scores with a
bias behind dense layers."""

from __future__ import annotations

from kvarn.models.architectures.deepseek import sparse_layers
from kvarn.models.architectures.exaone4 import usual_windows
from kvarn.models.architectures.glm4_moe import sigmoid_experts, without_draft_layers
from kvarn.models.dimensions import read_dimensions
from kvarn.models.hparams import HParams
from kvarn.models.rope import read_rope
from kvarn.models.spec import Block, FeedForward, ModelSpec
from kvarn.models.spec_builder import decoder, rms_norm, window_layers


def describe(hparams: HParams) -> ModelSpec:
    """Describe a K-EXAONE; its layers that draft tokens ahead are left out."""
    dims, norm = without_draft_layers(hparams, read_dimensions(hparams)), rms_norm(hparams)
    rope = read_rope(hparams, "half", dims.head_dim, dims.context_length)
    window: int | None = hparams.integer("sliding_window", default=0) or None
    windowed = window_layers(hparams, dims, usual_windows(hparams, dims, window))
    is_sparse, experts = sparse_layers(hparams, dims), sigmoid_experts(hparams)
    blocks = tuple(
        Block(
            mixer=dims.attention(
                layer,
                rope if window is None or windowed[layer] else None,
                window=window if windowed[layer] else None,
                qk_norm=norm,
            ),
            feed_forward=experts if is_sparse[layer] else FeedForward(dims.hidden[layer], hparams.activation("silu")),
            norm=norm,
        )
        for layer in range(dims.num_layers)
    )
    return decoder(hparams, dims, blocks, norm)
