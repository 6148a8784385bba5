"""The architectures that embed and score texts; registry.py has all."""

from __future__ import annotations

from typing import Final

from kvarn.models.architectures import eurobert, jina, modernbert, nomic_bert
from kvarn.models.architectures.entry import Architecture

# Where transformers has a class of one and none of another.
PARTLY_TRANSCRIBED: Final = "transformers; {}: a transcription of its authors' code"
ENCODERS: Final = (
    Architecture("EuroBERT (embeddings)", ("eurobert",), ("eurobert",), eurobert.describe, split=eurobert.drop_head),
    Architecture(
        "BERT, RoBERTa, XLM-RoBERTa, DistilBERT (embeddings, rerankers)",
        ("bert",),
        ("bert", "roberta", "xlm-roberta", "camembert", "distilbert"),
        jina.describe_bert,
        "encoder",
        split=jina.separate,
    ),
    Architecture(
        "Jina embeddings v2, v3 and rerankers",
        ("jina-bert-v2", "jina-bert-v3"),
        ("jina_embeddings_v3",),
        jina.describe_jina,
        "encoder",
        split=jina.separate,
        oracle=PARTLY_TRANSCRIBED.format("v2"),
    ),
    Architecture(
        "ModernBERT (embeddings, rerankers)", ("modern-bert",), ("modernbert",), modernbert.describe, "encoder"
    ),
    Architecture(
        "Nomic BERT (embeddings), dense and with experts",
        ("nomic-bert", "nomic-bert-moe"),
        ("nomic_bert",),
        nomic_bert.describe,
        "encoder",
        split=nomic_bert.stack_experts,
        oracle=PARTLY_TRANSCRIBED.format("with experts"),
    ),
)
