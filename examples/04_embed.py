"""Turn sentences into vectors and find the closest one."""

import kvarn

sentences = [
    "The cat sits on the mat.",
    "Stock markets fell on Friday.",
    "A kitten is resting on a rug.",
    "It will rain in the north.",
]

with kvarn.LLM("minilm") as llm:
    vectors = llm.embed(sentences)
    query = llm.embed("Where is the cat?")[0]

for similarity, sentence in sorted(zip(vectors @ query, sentences, strict=True), reverse=True):
    print(f"{similarity:.3f}  {sentence}")
