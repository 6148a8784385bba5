"""The way of one streamed chat through the server, from the socket to the token and back.

    python -m benchmarks.request_path MODEL.gguf

Measures the kvarn that the interpreter has installed: `kvarn serve` runs in this process with a profile function on
every thread, and one client asks it over a socket. The window opens with `data_received` and closes when the bytes of
the first token are written to the transport.

all functions   distinct functions of ours (below the package's folder, by code object; lambdas and comprehensions are
                part of the function around them) that were entered in the window
hops            those of them that hand the request or its token on from file to file: entered from another file, and
                on the stack at one of these moments:
                - work is given to another thread, task or process: create_task, run_in_executor,
                  call_soon_threadsafe, set_result, SimpleQueue.put, a write to a pipe or socket
                - Engine.step begins; the backend's forward or sample begins
                - an object of ours is made that carries the request (its text, its token ids, or another such object)
                  on its way to Engine.step, or the first token on its way back; the text of the first chunk is made
                - the bytes of the first token are written
places          containers (dict, list, set, deque, heap) in attributes of our objects that hold the live request: the
                Request, its id, the server's id of it, or an object made for it that leads to the Request. Looked at
                whenever Engine.step begins, so first in the queue and then running; the connection was open before
token forms     classes of ours whose objects carry the first token from the sampler to the socket

Prints the lists for people and one line of JSON, last.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import os
import re
import runpy
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import kvarn
from benchmarks.path_recorder import Question, Recorder, attributes, is_ours, values_of

MARKER = "quernstone"
MESSAGES = [{"role": "user", "content": f"Tell a long story about a {MARKER}."}]
MAX_TOKENS = 48
LOOKS = 8  # at the containers, one per step
REQUEST = "Request"  # name of the engine's class
SWITCH_S = 0.05  # recorded functions take longer: the token is written before the engine goes on
START_TIMEOUT_S = 120.0
PACKAGE = str(Path(kvarn.__file__ or "").parent) + os.sep


class Client:
    """Asks the server of this process over one connection; its own thread is not recorded."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_TIMEOUT_S)
        self._model = ""

    def wait(self) -> None:
        """Until the model is loaded."""
        ends_at = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if time.monotonic() > ends_at:
                raise TimeoutError(f"the server was not ready within {START_TIMEOUT_S:g} s")
            time.sleep(0.2)
        self._model = json.loads(self._ask("GET", "/v1/models"))["data"][0]["id"]

    def chat(self) -> str:
        """The first text of a streamed, greedy answer, once it is complete."""
        options = {"max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
        answer = self._post("/v1/chat/completions", messages=MESSAGES, **options)
        texts = [json.loads(text) for text in re.findall(rb'"content":("[^"]+")', answer)]
        return str(texts[0])

    def question(self) -> Question:
        """What the server will make of the chat: asked beforehand, which also warms it up."""
        first = self.chat()
        prompt_ids = json.loads(self._post("/tokenize", messages=MESSAGES))["tokens"]
        token_ids = json.loads(self._post("/tokenize", prompt=first, add_special_tokens=False))["tokens"]
        return Question(MARKER, prompt_ids, token_ids[0])

    def _is_ready(self) -> bool:
        try:
            return b'"ready"' in self._ask("GET", "/health/ready")
        except OSError:
            self._connection.close()
            return False

    def _post(self, path: str, **body: Any) -> bytes:
        return self._ask("POST", path, json.dumps({"model": self._model, **body}))

    def _ask(self, method: str, path: str, body: str | None = None) -> bytes:
        self._connection.request(method, path, body, {"content-type": "application/json"})
        return self._connection.getresponse().read()


class LiveRequest:
    """Finds the places that hold a request which began after this was made."""

    def __init__(self) -> None:
        self._before = {id(one): one for one in _objects_of_ours()}
        self._looks: list[set[str]] = []

    def look(self) -> None:
        """Called on the engine's thread, before a step."""
        if len(self._looks) < LOOKS:
            objects = _objects_of_ours()
            held = self._held(objects)
            self._looks.append({place for one in objects for place in _places(one, held)})

    @property
    def places(self) -> list[str]:
        return sorted(set().union(*self._looks))

    def _held(self, objects: list[Any]) -> set[Any]:
        """The ids of the request, and id() of it and of the new objects that lead to it."""
        young = [one for one in objects if id(one) not in self._before]
        requests = [one for one in young if type(one).__name__ == REQUEST]
        held: set[Any] = {id(one) for one in requests} | {one.id for one in requests}
        num_held = 0
        while num_held != len(held):
            num_held = len(held)
            held |= {id(one) for one in young if any(_holds(value, held) for value in values_of(one))}
            held |= {one.id for one in young if id(one) in held and isinstance(getattr(one, "id", None), str)}
        return held


def _objects_of_ours() -> list[Any]:
    return [one for one in gc.get_objects() if is_ours(type(one))]


def _places(owner: Any, held: set[Any]) -> list[str]:
    containers = (dict, list, set, deque)
    found = [name for name, value in attributes(owner) if isinstance(value, containers) and _holds(value, held)]
    return [f"{type(owner).__name__}.{name}" for name in found]


def _holds(value: Any, held: set[Any]) -> bool:
    """Whether a value, or what lies in it, is held; keys and entries may be tuples."""
    if isinstance(value, dict):
        return any(_holds(part, held) for entry in list(value.items()) for part in entry)
    if isinstance(value, list | tuple | set | deque):
        return any(_is_held(one, held) or (isinstance(one, tuple) and _holds(one, held)) for one in list(value))
    return _is_held(value, held)


def _is_held(value: Any, held: set[Any]) -> bool:
    return value in held if isinstance(value, str) else id(value) in held


def measure(client: Client, recorder: Recorder) -> dict[str, Any]:
    """Ask once, recorded."""
    client.wait()
    gc.unfreeze()  # what a server leaves out of collections is looked at here
    sys.setswitchinterval(SWITCH_S)
    question = client.question()
    time.sleep(0.5)  # what the warm-up left behind is over
    gc.collect()
    live = LiveRequest()
    recorder.on_step, recorder.question = live.look, question
    client.chat()
    functions = [code for code in recorder.entered if not code.co_name.startswith("<")]
    hops = recorder.hops
    return {
        "all_functions": len(functions),
        "all_files": len(_files(functions)),
        "hops": len(hops),
        "hop_files": len(_files(hops)),
        "places": len(live.places),
        "token_forms": len(recorder.token_forms),
        "hop_list": [f"{_file(code)} {code.co_qualname}" for code in hops],
        "place_list": live.places,
        "token_form_list": list(recorder.token_forms),
    }


def _file(code: CodeType) -> str:
    return code.co_filename.removeprefix(PACKAGE)


def _files(codes: Iterable[CodeType]) -> set[str]:
    return {_file(code) for code in codes}


def show(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        if isinstance(value, list):
            print(f"{name}:", *value, sep="\n    ")
        else:
            print(f"{name:16}{value:>6}")


def main() -> None:
    """Serve on the main thread, which signals need; ask on another, and end the process with the answer."""
    parser = argparse.ArgumentParser(description="The way of one streamed chat, counted.")
    parser.add_argument("model", help="path of a model that chats")
    model = parser.parse_args().model
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    recorder = Recorder(PACKAGE)
    threading.Thread(target=_ask_and_end, args=(Client(port), recorder), daemon=True).start()
    recorder.install()
    sys.argv = ["kvarn", "serve", "--port", str(port), "--model", model, "--context", "1024"]
    runpy.run_module("kvarn", run_name="__main__")


def _ask_and_end(client: Client, recorder: Recorder) -> None:
    code = 1
    try:
        figures = measure(client, recorder)
        show(figures)
        print(json.dumps(figures))
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
