"""How far llama.cpp's predictions are from ours on the same file, token by token. Needs llama-cpp-python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarn.config import EngineConfig
from kvarn.evaluation.divergence import token_divergence
from kvarn.evaluation.model import EvaluatedModel
from kvarn.evaluation.text import RunningText, cut_chunks

Float32 = npt.NDArray[np.float32]


def agreement(llama_cpp: Any, model: Path, text: RunningText, num_tokens: int) -> dict[str, float]:
    """KL(ours || theirs) over the first chunk of a text, and how often both think the same token the most probable."""
    ids, ours = _our_logits(model, text, EngineConfig(context=num_tokens, backend="native"))
    theirs = _their_logits(llama_cpp, model, ids[:-1])
    assert ours.shape == theirs.shape
    found = token_divergence(ours, theirs)
    return {"kl_mean": float(found.kl.mean()), "kl_max": float(found.kl.max()), "top1": float(found.agrees.mean())}


def from_exact(llama_cpp: Any, model: Path, text: RunningText, num_tokens: int) -> dict[str, float]:
    """KL from the same weights without any rounding of what they read: of ours, and of theirs."""
    exact = EngineConfig(context=num_tokens, backend="reference", kv_dtype="f32")
    ids, expected = _our_logits(model, text, exact)
    _, ours = _our_logits(model, text, EngineConfig(context=num_tokens, backend="native"))
    theirs = _their_logits(llama_cpp, model, ids[:-1])
    both = {"kl_ours_from_exact": ours, "kl_theirs_from_exact": theirs}
    return {name: float(token_divergence(expected, logits).kl.mean()) for name, logits in both.items()}


def _our_logits(model: Path, text: RunningText, config: EngineConfig) -> tuple[npt.NDArray[np.int32], Float32]:
    with EvaluatedModel(model, config) as loaded:
        assert config.context is not None
        ids = cut_chunks(text, loaded.tokenizer, config.context, 1).ids[0]
        return ids, np.concatenate(list(loaded.logits(loaded.states(ids, 0))))


def _their_logits(llama_cpp: Any, model: Path, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    llama = llama_cpp.Llama(str(model), n_ctx=len(ids), logits_all=True, verbose=False, n_threads=2, n_gpu_layers=0)
    try:
        llama.eval(ids.tolist())
        return np.array(llama.scores[: len(ids)], np.float32)
    finally:
        llama.close()
