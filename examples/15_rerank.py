"""Order documents by how well they answer a question; a model that chats does, a cross-encoder is faster."""

import kvarn

documents = [
    "The oven reaches 250 degrees after ten minutes.",
    "A water mill turns grain into flour between two stones.",
    "Stars are visible on clear nights only.",
]

with kvarn.LLM("smollm2") as llm:  # or "hf:BAAI/bge-reranker-v2-m3"
    for found in llm.rerank("How is flour made?", documents, top_n=2):
        print(f"{found.score:.3f}  {found.index}  {found.text}")
