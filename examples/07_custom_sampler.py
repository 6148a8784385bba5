"""Choose tokens with a sampler of your own: a mirostat-like one that keeps surprise near a target."""

import math

import numpy as np

import kvarn

TARGET = 3.0  # bits of surprise per token


def steady(logits, token_ids, draw):  # noqa: ARG001
    """Drop tokens more surprising than the target, then draw from the rest."""
    logprobs = logits - logits.max()
    logprobs -= math.log(np.exp(logprobs).sum())
    order = np.argsort(-logprobs, kind="stable")
    kept = order[-logprobs[order] / math.log(2) <= TARGET]
    if len(kept) == 0:
        return order[0]
    weights = np.cumsum(np.exp(logprobs[kept]))
    return kept[np.searchsorted(weights, draw() * weights[-1])]


kvarn.register_sampler("steady", steady)

with kvarn.LLM("smollm2") as llm:
    params = kvarn.SamplingParams(sampler="steady", max_tokens=40, seed=1)
    first, again = llm.generate(["The sea was calm, and"] * 2, params)
    print(first.text)
    print("the same again:", first.token_ids == again.token_ids)

    try:
        llm.generate("Once", kvarn.SamplingParams(sampler="nobody", max_tokens=1))
    except kvarn.KvarnError as error:
        print(error)
