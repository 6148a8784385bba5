"""Fifty questions, each with one to five tools, one of which answers it: what tools_auto.py asks a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """A question, the tools that go with it, and the one that answers it."""

    question: str
    tools: tuple[str, ...]
    wanted: str


def _tool(name: str, description: str, required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TEXT: dict[str, Any] = {"type": "string"}
_LANGUAGE: dict[str, Any] = {"enum": ["fr", "de", "es", "sv"]}
_HOUR: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 23}
_MINUTE: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 59}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 50}
TOOLS = {
    tool["function"]["name"]: tool
    for tool in (
        _tool(
            "get_weather",
            "Weather forecast of a city",
            ["city"],
            city=_TEXT,
            unit={"enum": ["celsius", "fahrenheit"]},
            days=_COUNT,
        ),
        _tool("search_web", "Search the web", ["query"], query=_TEXT, num_results=_COUNT),
        _tool(
            "convert_currency",
            "Convert money from one currency to another",
            ["amount", "source", "target"],
            amount={"type": "number"},
            source={"enum": ["USD", "EUR", "GBP", "JPY", "SEK"]},
            target={"enum": ["USD", "EUR", "GBP", "JPY", "SEK"]},
        ),
        _tool("send_email", "Send an email", ["to", "subject", "body"], to=_TEXT, subject=_TEXT, body=_TEXT),
        _tool("read_file", "Read a text file", ["path"], path=_TEXT, max_lines=_COUNT),
        _tool(
            "run_command",
            "Run a command in a shell",
            ["command"],
            command=_TEXT,
            timeout_s={"type": "integer", "minimum": 1, "maximum": 600},
        ),
        _tool(
            "create_event",
            "Put an event into the calendar",
            ["title", "date"],
            title=_TEXT,
            date={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
            guests={"type": "array", "items": _TEXT},
        ),
        _tool("translate", "Translate a text", ["text", "language"], text=_TEXT, language=_LANGUAGE),
        _tool("set_alarm", "Set an alarm", ["hour", "minute"], hour=_HOUR, minute=_MINUTE),
        _tool("query_database", "Run a SQL query on the sales database", ["sql"], sql=_TEXT),
    )
}

_QUESTIONS: tuple[tuple[str, str], ...] = (
    ("get_weather", "What's the weather like in Paris today?"),
    ("get_weather", "Will it rain in Oslo over the next three days?"),
    ("get_weather", "How warm is it in Tokyo right now, in celsius?"),
    ("get_weather", "Give me a five day forecast for Buenos Aires."),
    ("get_weather", "Do I need an umbrella in London tomorrow?"),
    ("search_web", "Find recent news about the James Webb telescope."),
    ("search_web", "Look up who won the 2022 football World Cup."),
    ("search_web", "Search for the best pasta recipes, ten results please."),
    ("search_web", "Who is the current secretary-general of the UN? Please look it up."),
    ("search_web", "Find me three articles about electric cars."),
    ("convert_currency", "How much is 100 US dollars in euros?"),
    ("convert_currency", "Convert 2500 Japanese yen to British pounds."),
    ("convert_currency", "I have 49.99 EUR. What is that in SEK?"),
    ("convert_currency", "What are 12 pounds worth in dollars?"),
    ("convert_currency", "Change 1000 SEK into JPY for me."),
    ("send_email", "Email anna@example.com that the meeting moved to Friday."),
    ("send_email", "Send bob@example.com a mail with the subject Hello and wish him a nice day."),
    ("send_email", "Write to support@example.com: my printer does not work any more."),
    ("send_email", "Tell the team at team@example.com by mail that the release is out."),
    ("send_email", "Send a thank you note to carol@example.com."),
    ("read_file", "Show me what is in /etc/hosts."),
    ("read_file", "Read the first 20 lines of README.md."),
    ("read_file", "What does the file config/settings.toml contain?"),
    ("read_file", "Open notes.txt and read it."),
    ("read_file", "I want to see src/main.py."),
    ("run_command", "List all files in the current directory."),
    ("run_command", "How much free disk space is there? Use df."),
    ("run_command", "Run the tests with pytest, at most 60 seconds."),
    ("run_command", "Count the lines of all Python files here with wc."),
    ("run_command", "Show me the last five git commits."),
    ("create_event", "Put a dentist appointment on 2026-03-14 into my calendar."),
    ("create_event", "Schedule a birthday party for 2026-07-01 with Ann and Bob."),
    ("create_event", "Add an event called Sprint review on 2026-01-20."),
    ("create_event", "Plan a lunch with maria@example.com for 2026-05-05."),
    ("create_event", "Create a calendar entry: conference, 2026-11-30."),
    ("translate", "Translate 'good morning' into French."),
    ("translate", "How do you say 'where is the station' in German?"),
    ("translate", "What is 'thank you very much' in Spanish?"),
    ("translate", "Please translate 'I love winter' to Swedish."),
    ("translate", "Give me the German for 'the quick brown fox'."),
    ("set_alarm", "Wake me at 6:30."),
    ("set_alarm", "Set an alarm for quarter past seven in the morning."),
    ("set_alarm", "I need an alarm at 22:45."),
    ("set_alarm", "Set an alarm for noon."),
    ("set_alarm", "Please wake me up at 5 o'clock tomorrow."),
    ("query_database", "How many orders were there in 2024? Ask the sales database."),
    ("query_database", "Get the ten customers with the highest revenue from the database."),
    ("query_database", "What is the average price of all products in the database?"),
    ("query_database", "Select all rows of the table invoices that are not paid."),
    ("query_database", "Count the customers by country with SQL."),
)


def _tools_of(index: int, wanted: str) -> tuple[str, ...]:
    """One to five tools, the wanted one at a changing place."""
    names = list(TOOLS)
    others = [names[(index * 3 + step) % len(names)] for step in range(1, len(names) + 1)]
    chosen = [name for name in dict.fromkeys(others) if name != wanted][: index % 5]
    chosen.insert(index % (len(chosen) + 1), wanted)
    return tuple(chosen)


TASKS = tuple(Task(question, _tools_of(index, wanted), wanted) for index, (wanted, question) in enumerate(_QUESTIONS))
