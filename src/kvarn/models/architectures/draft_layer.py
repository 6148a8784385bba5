"""Layers behind a model's last one that predict one token further (MTP, GGUF's nextn), as a small model of their own.

With t the tokens and h[p] the model's state at p after its output norm, such a layer reads, for every position p,
x[p] = eh_proj(enorm(embedding(t[p + 1])), hnorm(h[p])), is a decoder layer with a cache of its own, and
shared_head_norm of what it gives, through the model's own head, predicts t[p + 2]. To guess further, that normed state
is taken for h[p + 1]. The embedding and the head are the model's: copies of them in files are left out.
"""

from __future__ import annotations

from dataclasses import replace

from kvarn.formats.tensor_view import ViewEntry, WeightView
from kvarn.models.hparams import HParams
from kvarn.models.spec import Block, InputEmbedding, ModelSpec

NAMES = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head_norm": "output_norm"}
COPIES = ("embed_tokens", "shared_head_head")  # of what the model has


def draft_block(hparams: HParams, blocks: tuple[Block, ...]) -> Block | None:
    """The layer behind the last one, which is as the last one is; None: the file has none."""
    return blocks[-1] if hparams.has_tensor(f"blk.{len(blocks)}.nextn.eh_proj.weight") else None


def draft_spec(spec: ModelSpec) -> ModelSpec:
    """The layer as a model whose rows come as embeddings and states, and whose output is a state."""
    assert spec.draft is not None
    assert spec.output_norm is not None
    return replace(
        spec,
        name=f"{spec.name} (draft layer)",
        embedding=InputEmbedding(joined=spec.output_norm),
        blocks=(spec.draft,),
        head=None,
        draft=None,
    )


def draft_view(spec: ModelSpec, view: WeightView) -> WeightView:
    """Its tensors, under the names that a model of one layer has. spec: of the whole model."""
    stem, found = f"blk.{len(spec.blocks)}.", dict[str, ViewEntry]()
    for name, entry in view.entries.items():
        if not name.startswith(stem):
            continue
        local = name.removeprefix(stem)
        if local.startswith("nextn."):
            part, _, suffix = local.removeprefix("nextn.").rpartition(".")
            if part in COPIES:
                continue
            local = f"{NAMES.get(part, part)}.{suffix}"
        else:
            local = f"blk.0.{local}"
        found[local] = replace(entry, info=replace(entry.info, name=local))
    return WeightView(view.source, found)
