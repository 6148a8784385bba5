"""Chats about this project's documents, end to end: what is refused, and which sources are cited, rightly or not.

    python -m benchmarks.grounded_chats [--questions 50] [--models smollm2,qwen-coder] [--cite free,every_sentence]
        [--folder FOLDER] [--judge] [--output DIR]

Asks `llm.chat(retrieve=)` (greedy, 96 tokens, four sources) the reporting questions of `grounding_questions.jsonl`,
evenly chosen, and writes every answer into `grounded_chats.jsonl`, with the sources that its sentences cite. Which
sources support them is judged by hand there: `supported`. What was judged before, there or in
`grounding_answers.jsonl`, is taken over where question, sentence and source are the same; what was not is null.
`--judge` asks nobody and counts again. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.assets import qwen_coder, smollm2
from tests.results import write_result

import kvarn
from benchmarks.grounding import K, pages
from benchmarks.turns import command_line
from kvarn.bench.report import describe_machine
from kvarn.retrieval.collection import Collection
from kvarn.retrieval.search.rag_prompt import REFUSAL

HERE = Path(__file__).parent
ANSWERS = HERE / "grounded_chats.jsonl"
MODELS: dict[str, Callable[[], Path]] = {"smollm2": smollm2, "qwen-coder": qwen_coder}
CITES = ("free", "every_sentence")
PARAMS = kvarn.SamplingParams(max_tokens=96, temperature=0.0)
Row = dict[str, Any]
Judged = Mapping[tuple[str, str, str], bool]  # question, sentence, source -> whether it is supported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cite", default=",".join(CITES))
    parser.add_argument("--folder", type=Path, help="where the collection is made and kept")
    parser.add_argument("--judge", action="store_true", help="only count what was answered before")
    parser.add_argument("--output", type=Path, help="folder for grounded-chats.json")
    options = parser.parse_args()
    if not options.judge:
        with tempfile.TemporaryDirectory() as scratch, Collection("docs", folder=options.folder or scratch) as docs:
            docs.add(pages())
            for model in options.models.split(","):
                _ask_model(docs, model, options.cite.split(","), chosen(options.questions))
    table = {what: value for key in _groups() for what, value in counted(*key).items()}
    for what, value in table.items():
        print(f"{what:70}  {value}")
    print(json.dumps({"bench": "grounded-chats", "machine": describe_machine(), "rows": table}))
    if options.output is not None:
        write_result("grounded-chats", table, options.output, command_line("benchmarks.grounded_chats"))


def chosen(number: int) -> list[Row]:
    """So many questions of the reporting part, those with an answer and those without in their shares."""
    rows = [row for row in _read(HERE / "grounding_questions.jsonl") if row["part"] == "reporting"]
    absent = [row for row in rows if "absent" in row]
    answerable = [row for row in rows if "absent" not in row]
    num_absent = round(number * len(absent) / len(rows))
    return _spread(answerable, number - num_absent) + _spread(absent, num_absent)


def _spread(rows: Sequence[Row], number: int) -> list[Row]:
    return [rows[n * len(rows) // number] for n in range(number)]


def _ask_model(docs: Collection, model: str, cites: Sequence[str], questions: Sequence[Row]) -> None:
    with kvarn.LLM(MODELS[model](), context=2048) as llm:
        for cite in cites:
            answers = []
            for number, row in enumerate(questions, 1):
                print(f"\r{model}, {cite}: {number} of {len(questions)}", end="", flush=True)
                answers.append({"model": model, "cite": cite, **_answered(llm, docs, row, cite)})
            print()
            judged = _judged()
            others = [row for row in _read(ANSWERS) if (row["model"], row["cite"]) != (model, cite)]
            _write(ANSWERS, [*others, *(_with_labels(row, judged) for row in answers)])


def _answered(llm: kvarn.LLM, docs: Collection, row: Row, cite: str) -> Row:
    messages = [{"role": "user", "content": row["question"]}]
    answer = llm.chat(messages, PARAMS, retrieve=docs.grounding(k=K, cite=cite))
    return {
        "question": row["question"],
        "passage": row.get("passage"),  # None: the documents leave it open
        "text": answer.text,
        "sources": [citation.text for citation in answer.citations],
        "sentences": [
            {"text": answer.text[slice(*one.span)], "cited": sorted(passage.number for passage in one.passages)}
            for one in answer.sentences
        ],
    }


def _with_labels(row: Row, judged: Judged) -> Row:
    for sentence in row["sentences"]:
        labels = [judged.get((row["question"], sentence["text"], source)) for source in row["sources"]]
        is_whole = all(label is not None for label in labels)
        sentence["supported"] = [n for n, label in enumerate(labels, 1) if label] if is_whole else None
    return row


def _judged() -> Judged:
    labels: dict[tuple[str, str, str], bool] = {}
    for row in _read(HERE / "grounding_answers.jsonl"):
        for answer in row["answers"].values():
            for sentence in _sentences(answer["text"]):
                numbers = answer["supported"].get(sentence, ())
                for number, source in enumerate(row["sources"], 1):
                    labels[row["question"], sentence, source["text"]] = number in numbers
    for row in _read(ANSWERS):
        for one in row["sentences"]:
            for number, source in enumerate(row["sources"], 1) if one["supported"] is not None else ():
                labels[row["question"], one["text"], source] = number in one["supported"]
    return labels


def _sentences(text: str) -> Iterable[str]:
    from kvarn.retrieval.search.sentences import sentence_spans

    return [text[slice(*span)] for span in sentence_spans(text)]


def _groups() -> list[tuple[str, str]]:
    return sorted({(row["model"], row["cite"]) for row in _read(ANSWERS)})


def counted(model: str, cite: str) -> dict[str, Any]:
    """Refusals, and precision and recall of what is cited, and of the numbers that the model wrote."""
    rows = [row for row in _read(ANSWERS) if (row["model"], row["cite"]) == (model, cite)]
    answerable, absent = ([row for row in rows if (row["passage"] is None) == is_open] for is_open in (False, True))
    ours, truth, written, unjudged = set(), set(), set(), 0
    for number, row in enumerate(rows):
        for place, one in enumerate(row["sentences"]):
            if one["supported"] is None:
                unjudged += 1
                continue
            ours |= {(number, place, source) for source in one["cited"]}
            truth |= {(number, place, source) for source in one["supported"]}
        written |= {(number, int(source)) for source in re.findall(r"\[(\d+)\]", row["text"])}
    right = [row for row in answerable if any(row["passage"] in source for source in row["sources"])]
    cited = [row for row in right if any(row["passage"] in source for source in _cited(row))]
    sources = [{(number, source) for number, _, source in pairs} for pairs in (ours, truth)]
    head = f"{model}, {cite}: "
    judged = {
        f"{head}pairs of sentence and source": _shown(ours, truth),
        f"{head}sources of an answer": _shown(*sources),
        f"{head}sources by the written numbers": _shown(written, sources[1]),
    }
    return {
        f"{head}unanswerable refused": _share(_refused(absent), len(absent)),
        f"{head}answerable refused": _share(_refused(answerable), len(answerable)),
        f"{head}source with the passage cited, of those with it": _share(len(cited), len(right)),
        **({f"{head}sentences not judged": unjudged} if unjudged else judged),
    }


def _cited(row: Row) -> list[str]:
    numbers = {number for one in row["sentences"] for number in one["cited"]}
    return [row["sources"][number - 1] for number in sorted(numbers)]


def _refused(rows: Sequence[Row]) -> int:
    return sum(row["text"] == REFUSAL for row in rows)


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / max(whole, 1):.0%})"


def _shown(ours: set[Any], truth: set[Any]) -> str:
    right = len(ours & truth)
    precision, recall = right / max(len(ours), 1), right / max(len(truth), 1)
    return f"precision {precision:.2f} ({right} of {len(ours)}), recall {recall:.2f} (of {len(truth)})"


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _write(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
