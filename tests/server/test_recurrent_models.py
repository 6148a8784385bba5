"""Models with recurrent states under `kvarn serve`: unloaded for each other, they come back with the same answers."""

from __future__ import annotations

from pathlib import Path

from kvarn.config import EngineConfig
from kvarn.server.models.catalog import MemoryRoom, plan_load
from tests.recurrent_model import write_recurrent_model, write_state_space_model
from tests.server.asking import TEXT, answer
from tests.server.process import ServerProcess
from tests.server.scraping import read, scrape

CONTEXT = 256
PROMPT = "The mill stood by the river, and every morning the miller opened the gate. " * 2


def test_models_with_states_are_unloaded_and_loaded_again_with_the_same_answers(tmp_path: Path) -> None:
    paths = [write_recurrent_model(tmp_path / "mixed"), write_state_space_model(tmp_path / "states")]
    room = MemoryRoom(1 << 40, 1 << 40, is_shared=True)
    plans = [plan_load("m", str(path), EngineConfig(context=CONTEXT), room) for path in paths]
    budget = max(plan.entry.needed_bytes for plan in plans) + (8 << 20)
    flags = [part for path in paths for part in ("--model", str(path))]
    config = f"memory_bytes = {budget}\n"
    with ServerProcess(*flags, "--context", str(CONTEXT), config=config) as server, server.client() as client:
        seen: dict[str, list[str]] = {"mixed": [], "states": []}
        for _ in range(2):
            for name, texts in seen.items():
                for _ in range(2):  # computed, then from a snapshot
                    body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 3}
                    texts.append(answer(client, TEXT, body)["choices"][0]["text"])
                cards = client.get("/v1/models").json()["data"]
                assert [card["id"] for card in cards if card["is_loaded"]] == [name]
                found = scrape(server)
                assert read(found, "kvarn_state_slots_total", model_name=name) >= 4
                assert read(found, "kvarn_state_slots_used", model_name=name) == 0
        assert all(len(texts) == 4 and len(set(texts)) == 1 for texts in seen.values())
