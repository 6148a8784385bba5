"""Answers that parse: a JSON schema, a pattern and a grammar, all on one small model."""

import json

import kvarn

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "languages": {"type": "array", "items": {"enum": ["English", "Swedish", "Hindi"]}, "maxItems": 2},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}

with kvarn.LLM("smollm2") as llm:
    params = kvarn.SamplingParams(constraint=kvarn.JsonSchema(PERSON), max_tokens=100, temperature=0.8, seed=1)
    answer = llm.chat([{"role": "user", "content": "Invent a person."}], params)
    if answer.finish_reason == kvarn.FinishReason.STOP:  # at "length" it was cut and need not parse
        print(json.loads(answer.text))

    date = kvarn.Regex("(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]")
    print(llm.generate("Neil Armstrong walked on the moon on ", params.replace(constraint=date)).text)

    sums = kvarn.Grammar('start: NUMBER " + " NUMBER " = " NUMBER\nNUMBER: /[0-9]{1,2}/')
    print(llm.generate("1 + 2 = 3\n4 + 4 = 8\n", params.replace(constraint=sums)).text)

    try:
        llm.generate("x", params.replace(constraint=kvarn.JsonSchema({"type": "array", "uniqueItems": True})))
    except kvarn.ConstraintError as error:
        print(error)
