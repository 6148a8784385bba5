"""Guess the answer, get it sooner: the same text with and without speculation, and how many guesses were right."""

import kvarn

CODE = "def area(width, height):\n    return width * height\n\n\ndef half(number):\n    return number / 2\n"
MESSAGES = [{"role": "user", "content": f"Repeat this file, with one word changed:\n\n{CODE}"}]


def main() -> None:
    config = kvarn.EngineConfig(speculation="auto")  # also: kvarn serve --speculate auto
    with kvarn.LLM("smollm2", config=config) as llm:
        # What the caller expects; the answer never depends on it.
        expecting = kvarn.SamplingParams(max_tokens=60, temperature=0.7, seed=1, prediction=CODE)
        answer = llm.chat(MESSAGES, expecting)
        plain = llm.chat(MESSAGES, expecting.replace(speculate=False))
        assert answer.token_ids == plain.token_ids
        print(answer.text)

        stats = llm.stats()
        print(f"{sum(stats.accepted_per_position)} of {stats.draft_tokens} guessed tokens were right")
        print(f"of the prediction: {answer.usage.accepted_prediction_tokens}")


main()
