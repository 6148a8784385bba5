"""Index a folder of documents and answer a question from them, with sources."""

import tempfile
from pathlib import Path

import kvarn
from kvarn.retrieval.ingest.files import list_files, read_file

here = Path("docs")  # run from the root of the repository
files = list_files([here / "retrieval.md", here / "quickstart.md", here / "adding-a-sampler.md"])
question = "Which file of a collection is written last?"

with (
    tempfile.TemporaryDirectory() as folder,
    kvarn.LLM("minilm") as encoder,
    kvarn.LLM("smollm2") as llm,
    kvarn.Collection("docs", model=encoder, folder=folder) as docs,  # leave folder out to keep it
):
    docs.add(read_file(path) for path in files)
    for hit in docs.search(question, k=2):
        print(f"{hit.score:.3f}  {hit.relevance:.3f}  {hit.source}  {hit.heading}")

    params = kvarn.SamplingParams(max_tokens=60, temperature=0.0)
    answer = llm.chat([{"role": "user", "content": question}], params, retrieve=docs.grounding(k=2))
    for sentence in answer.sentences:
        numbers = " ".join(f"[{passage.number}]" for passage in sentence.passages)
        print(answer.text[slice(*sentence.span)], numbers or "(not in the sources)")
    for source in answer.citations:
        print(f"[{source.number}] {source.source}, characters {source.span[0]} to {source.span[1]}")

    absent = llm.chat([{"role": "user", "content": "Which currency is used in Norway?"}], params, retrieve=docs)
    print(absent.text)  # This is not in your documents.
