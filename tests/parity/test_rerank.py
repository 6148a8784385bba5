"""Reranking: a tiny random cross-encoder against transformers, and a real model's yes and no."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvarn
from kvarn.cli.main import app
from kvarn.reranking.rank import prepare, rerank
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.embedder import ModelEmbedder
from tests.assets import smollm2
from tests.unit.retrieval.words import WordEmbedder

WORDS = [
    "the",
    "mill",
    "grinds",
    "grain",
    "into",
    "flour",
    "stars",
    "shine",
    "at",
    "night",
    "bread",
    "is",
    "baked",
    "in",
    "an",
    "oven",
    "who",
    "does",
    "what",
]
PAIRS = [
    ("what grinds grain", "the mill grinds grain into flour"),
    ("what grinds grain", "stars shine at night"),
    ("who", "bread is baked in an oven at night in the mill"),
]


@pytest.fixture(scope="module", params=[1, 2], ids=["one label", "two labels"])
def cross_encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder as cross-encoders are published, the model and the tokenizer of transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("cross-encoder")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), max_position_embeddings=48, num_labels=request.param, **sizes
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)  # so that every part shows in the scores
    model.save_pretrained(folder)
    return folder, model, tokenizer


@pytest.mark.parametrize(("backend", "tolerance"), [("reference", 1e-4), ("native", 5e-3)])
def test_a_cross_encoder_scores_as_transformers_does(
    cross_encoder: tuple[Path, Any, Any], backend: str, tolerance: float
) -> None:
    torch = pytest.importorskip("torch")
    folder, model, tokenizer = cross_encoder
    inputs = tokenizer([a for a, _ in PAIRS], [b for _, b in PAIRS], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs).logits.numpy()
    assert np.ptp(expected) > 0.1  # the random model says something
    with kvarn.LLM(folder, backend=backend) as llm:
        assert np.abs(llm.classify(PAIRS) - expected).max() <= tolerance


def test_documents_come_best_first(cross_encoder: tuple[Path, Any, Any]) -> None:
    query, documents = "what grinds grain", ["bread is baked", "the mill grinds grain", "bread is baked", "stars"]
    with kvarn.LLM(cross_encoder[0], backend="reference") as llm:
        scores = rerank(llm, query, documents)
        found = llm.rerank(query, documents)
        assert [one.index for one in found] == sorted(range(4), key=lambda i: (-scores[i], i))
        assert [one.text for one in found] == [documents[one.index] for one in found]
        assert [one.score for one in found] == [float(scores[one.index]) for one in found]
        assert llm.rerank(query, documents, top_n=2) == found[:2]
        long = llm.rerank(query, ["stars shine at night " * 40 + "the mill grinds grain"])  # in parts
        assert 0 < long[0].score < 1
        for wrong in ([], "grain", ["grain", ""], ["grain", 3]):
            with pytest.raises(kvarn.InvalidParameter, match="documents are"):
                llm.rerank(query, wrong)  # type: ignore[arg-type]


def test_the_command_shows_hits_in_the_order_of_a_reranking_model(
    cross_encoder: tuple[Path, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVARN_HOME", str(tmp_path))
    monkeypatch.setattr("kvarn.retrieval.opening.ModelEmbedder", lambda *_: WordEmbedder())
    texts = ["bread is baked in an oven", "the mill grinds grain", "stars shine at night", "the mill is at the oven"]
    with Collection("mills", model=WordEmbedder()) as collection:
        collection.add(texts)
    with kvarn.LLM(cross_encoder[0]) as llm:
        expected = [(texts[one.index], one.score) for one in llm.rerank("the mill", texts)]
    command = ["search", "--collection", "mills", "--rerank", str(cross_encoder[0]), "-k", "3"]
    shown = CliRunner().invoke(app, [*command, "--json", "the", "mill"])
    assert shown.exit_code == 0, shown.output
    hits = json.loads(shown.stdout)
    assert [hit["text"] for hit in hits] == [text for text, _ in expected[:3]]
    assert [hit["score"] for hit in hits] == pytest.approx([score for _, score in expected[:3]])
    refused = CliRunner().invoke(app, ["search", "--collection", "mills", "--rerank", str(tmp_path / "none"), "mill"])
    assert refused.exit_code != 0


def test_coroutines_rerank_as_threads_do(cross_encoder: tuple[Path, Any, Any]) -> None:
    async def ask() -> tuple[list[kvarn.RankedDocument], list[kvarn.RankedDocument]]:
        async with kvarn.AsyncLLM(str(cross_encoder[0]), backend="reference") as llm:
            found = await llm.rerank("who", ["grain", "flour", "stars"], top_n=2)
            return found, llm.llm.rerank("who", ["grain", "flour", "stars"], top_n=2)

    theirs, ours = asyncio.run(ask())
    assert theirs == ours
    assert len(ours) == 2


@pytest.mark.parametrize("kind", ["RobertaProcessing", "TemplateProcessing"])
def test_a_tokenizer_without_a_second_type_gives_both_texts_the_first(
    kind: str, cross_encoder: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    """As jina-reranker-v1: a model with two token types and the tokenizer of a RoBERTa."""
    torch = pytest.importorskip("torch")
    folder, model, tokenizer = cross_encoder
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "tokenizer.json").read_text())
    marks = {"sep": ["[SEP]", 3], "cls": ["[CLS]", 2], "trim_offsets": True, "add_prefix_space": False}
    if kind == "RobertaProcessing":
        written["post_processor"] = {"type": kind, **marks}
    else:
        for item in written["post_processor"]["pair"]:
            next(iter(item.values()))["type_id"] = 0
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    changed = type(tokenizer._tokenizer).from_file(str(tmp_path / "tokenizer.json"))
    encoded = changed.encode(*PAIRS[0])
    assert set(encoded.type_ids) == {0}
    with torch.no_grad():
        expected = model(torch.tensor([encoded.ids])).logits.numpy()[0]
    with kvarn.LLM(tmp_path, backend="reference") as llm, kvarn.LLM(folder, backend="reference") as other:
        assert np.abs(llm.classify(PAIRS[:1])[0] - expected).max() <= 1e-4
        assert np.abs(other.classify(PAIRS[:1])[0] - expected).max() > 1e-3


def test_a_classifier_of_many_labels_is_no_reranker(cross_encoder: tuple[Path, Any, Any], tmp_path: Path) -> None:
    _, model, tokenizer = cross_encoder
    config = copy.deepcopy(model.config)
    config.num_labels = 3
    tokenizer.save_pretrained(tmp_path)
    type(model)(config).save_pretrained(tmp_path)
    with kvarn.LLM(tmp_path, backend="reference") as llm:
        assert llm.classify(PAIRS).shape == (len(PAIRS), 3)
        with pytest.raises(kvarn.UnsupportedModel, match=r"3 classes.*one label or two"):
            rerank(llm, "mill", ["flour"])


def test_the_second_text_is_in_a_segment_of_its_own(cross_encoder: tuple[Path, Any, Any]) -> None:
    with kvarn.LLM(cross_encoder[0]) as llm:
        one, other = llm.classify([("mill grain", "flour"), ("mill", "grain flour")])
        assert np.abs(one - other).max() > 1e-3


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A reranker such as bge-reranker: a unigram tokenizer, two separators between the texts, one label."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("roberta")
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -9.0)]
    pieces += [(f"\u2581{word}", -2.0) for word in WORDS] + [(letter, -8.0) for letter in "abdefghiklnorstuw"]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=3))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.XLMRobertaConfig(
        vocab_size=len(pieces), max_position_embeddings=48, num_labels=1, type_vocab_size=1, pad_token_id=1, **sizes
    )
    torch.manual_seed(0)
    model = transformers.XLMRobertaForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    return folder, model, tokenizer


def test_a_roberta_scores_pairs_as_transformers_does(roberta: tuple[Path, Any, Any]) -> None:
    torch = pytest.importorskip("torch")
    folder, model, tokenizer = roberta
    expected = []
    with torch.no_grad():
        for pair in PAIRS:
            inputs = tokenizer(*pair, return_tensors="pt", return_token_type_ids=False)
            expected.append(model(**inputs).logits.numpy()[0])
    with kvarn.LLM(folder, backend="reference") as llm:
        together = llm.classify(PAIRS)
        assert np.abs(together - np.stack(expected)).max() <= 1e-4
        assert np.ptp(together) > 0.01
    with kvarn.LLM(folder) as llm:
        together = llm.classify(PAIRS)
        assert np.abs(together - np.stack(expected)).max() <= 5e-3
        np.testing.assert_array_equal(np.concatenate([llm.classify([pair]) for pair in PAIRS]), together)
        scores = rerank(llm, PAIRS[0][0], [document for _, document in PAIRS])
        assert ((scores > 0) & (scores < 1)).all()
        assert llm.classify([]).shape == (0, 1)


def test_vectors_are_made_behind_the_models_own_prompts(roberta: tuple[Path, Any, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    folder, model, tokenizer = roberta
    tokenizer.save_pretrained(tmp_path)
    model.roberta.save_pretrained(tmp_path)
    prompts = {"query": "what grinds: ", "document": "the "}
    config = {"prompts": prompts, "default_prompt_name": "document"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    encoder = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with kvarn.LLM(tmp_path, backend="reference") as llm:
        for name, prompt in [*prompts.items(), (None, "the ")]:
            with torch.no_grad():
                states = encoder(**tokenizer(f"{prompt}mill", return_tensors="pt", return_token_type_ids=False))[0][0]
            ours = llm.embed("mill", normalize=False, prompt_name=name)[0]
            assert np.abs(ours - states.mean(dim=0).numpy()).max() <= 1e-3  # the cache has half floats
        for role in ("query", "document"):
            assert np.array_equal(ModelEmbedder(llm).embed_as(["mill"], role), llm.embed(["mill"], prompt_name=role))
        with pytest.raises(kvarn.InvalidParameter, match="query, document"):
            llm.embed("mill", prompt_name="passage")
    with kvarn.LLM(folder, backend="reference") as llm, pytest.raises(kvarn.UnsupportedModel, match="scores pairs"):
        llm.embed("mill", prompt_name="query")


def test_a_long_document_counts_as_its_best_part(cross_encoder: tuple[Path, Any, Any]) -> None:
    with kvarn.LLM(cross_encoder[0]) as llm:
        scores = rerank(llm, "what grinds grain", ["stars shine at night. " * 40, "the mill", "flour"])
        assert scores.shape == (3,)
        assert ((scores > 0) & (scores < 1)).all()
        with pytest.raises(kvarn.UnsupportedModel, match="scores pairs"):
            llm.embed("mill")
        with pytest.raises(kvarn.InvalidParameter, match="at most half"):
            rerank(llm, "mill " * 100, ["flour"])


@pytest.mark.model
def test_yes_and_no_of_a_language_model_are_probabilities_and_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvarn.LLM(smollm2(), context=512) as llm:
        documents = ["A mill grinds grain into flour.", "Stars shine at night."]
        scores = rerank(llm, "What does a mill do?", documents)
        assert ((scores > 0) & (scores < 1)).all()
        assert (rerank(llm, "What does a mill do?", documents) == scores).all()
        assert llm.stats().prefix_hit_tokens > 0
        with monkeypatch.context() as patched:
            submit, priorities = llm.submit, set()
            patched.setattr(
                llm, "submit", lambda *args, **options: priorities.add(args[1].priority) or submit(*args, **options)
            )
            assert (prepare(llm, "What does a mill do?", documents).scores("", 5) == scores).all()
            assert priorities == {5}
        with Collection("c", folder=tmp_path, model=WordEmbedder()) as collection:
            collection.add(documents)
            hits = collection.search("what does a mill do", k=2, rerank=llm)
            assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
            assert len(hits) == 2
