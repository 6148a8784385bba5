"""Fill in a form with a diffusion model: what stands around the slots stays, and rules are always followed."""

import kvarn

TEMPLATE = "Once upon a time, {{name}} had a {{pet}}. One day they {{did}}. The end."
SLOTS = {
    "name": kvarn.Slot(regex="[A-Z][a-z]+", max_tokens=6),
    "pet": kvarn.Slot(choices=("dog", "cat", "little red bird")),
    "did": kvarn.Slot(max_tokens=8),
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 1}},
}

with kvarn.LLM("tiny-diffusion") as llm:
    filled = llm.fill(TEMPLATE, SLOTS)
    print(filled.text)
    print(dict(filled.values))
    print(llm.fill(PERSON, prompt="Tom was five years old. ").text)
