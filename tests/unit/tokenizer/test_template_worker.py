"""Hostile templates are refused in time, in another process; the serving process neither grows nor stops."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvarn.errors import HelperUnavailable, TemplateError
from kvarn.tokenizer.chat.template_worker import TemplateLimits, TemplateWorker, shared_worker

MAX_REFUSAL_S = 0.25
MAX_GROWTH_BYTES = 16 << 20

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ messages.append.__self__.__class__ }}",
    "{{ messages.__len__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['os'] }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ ''|attr('__class__')|attr('__mro__')|list }}{{ (''|attr('__class__')).x }}",
    "{{ '{0.__class__}'.format_map({}) }}",
    "{{ lipsum.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
]

BOMBS = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(3000) %}{% for j in range(3000) %}x{% endfor %}{% endfor %}",
    "{{ 'a'*10**9 }}",
    "{{ '%300000000d'|format(1) }}",
    "{{ 'a'.ljust(300000000) }}",
    "{{ '{:>300000000}'.format(1) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set s = ('a'*1000)|replace('a', 'a'*1000)|replace('a', 'a'*1000) %}{{ s|length }}",
    "{{ [1]|batch(100000000, 0)|list|length }}",
    "{{ 'a\nb'|indent(300000000) }}",
    "{{ [1]|tojson(indent=300000000) }}",
    "{{ 'x' * 17000000 }}",
    "{{ 2**4000000 }}",
]


@pytest.fixture(scope="module")
def worker() -> Iterator[TemplateWorker]:
    worker = TemplateWorker()
    assert worker.render("{{ 1 + 1 }}", {}) == "2"
    yield worker
    worker.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_cannot_reach_out_of_its_language(worker: TemplateWorker, template: str) -> None:
    with pytest.raises(TemplateError):
        worker.render(template, {"messages": [{"role": "user"}]})


@pytest.mark.parametrize("template", BOMBS)
def test_a_bomb_is_refused_in_time_and_the_next_template_renders(
    worker: TemplateWorker, template: str, patience: float
) -> None:
    assert worker.render("{{ x }}", {"x": "before"}) == "before"
    resident, begin = resident_bytes(), time.perf_counter()
    with pytest.raises(TemplateError):
        worker.render(template, {})
    assert time.perf_counter() - begin < MAX_REFUSAL_S * patience
    assert resident_bytes() - resident < MAX_GROWTH_BYTES
    assert worker.render("{{ x }}", {"x": "after"}) == "after"


def test_starting_does_not_wait_and_the_worker_is_soon_ready(patience: float) -> None:
    worker = TemplateWorker()
    begin = time.perf_counter()
    worker.start()
    started_s = time.perf_counter() - begin
    worker.render("{{ 1 }}", {})
    ready_s = time.perf_counter() - begin
    worker.close()
    assert started_s < 0.05 * patience
    assert ready_s < 0.1 * patience


def test_a_template_can_refuse_a_conversation_in_its_own_words(worker: TemplateWorker) -> None:
    with pytest.raises(TemplateError, match="roles must alternate; change the messages"):
        worker.render("{{ raise_exception('roles must alternate') }}", {})


def test_a_syntax_error_is_reported(worker: TemplateWorker) -> None:
    with pytest.raises(TemplateError, match="syntax error"):
        worker.render("{% if %}", {})


def test_a_worker_killed_while_idle_is_replaced_unnoticed(worker: TemplateWorker) -> None:
    worker.render("{{ 1 }}", {})
    assert worker._process is not None
    worker._process.send_signal(signal.SIGKILL)
    worker._process.wait()
    assert worker.render("{{ 2 }}", {}) == "2"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a process has computed")
def test_a_worker_that_gets_no_processor_for_a_while_is_waited_for(worker: TemplateWorker) -> None:
    assert worker.render("{{ 1 }}", {}) == "1"
    process = worker._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    threading.Timer(0.6, process.send_signal, [signal.SIGCONT]).start()  # three times its deadline
    assert worker.render("{{ 2 }}", {}) == "2"
    assert worker._process is process


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells that a process was stopped")
def test_a_stopped_worker_is_replaced_and_the_conversation_rendered(worker: TemplateWorker) -> None:
    worker.render("{{ 1 }}", {})
    process = worker._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    assert worker.render("{{ 2 }}", {}) == "2"
    assert worker._process is not process
    assert process.poll() == -signal.SIGKILL


SLOW = "{% for i in range(3000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}"  # ends by its CPU time


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_two_workers_lost_in_a_row_are_no_fault_of_the_conversation(signum: signal.Signals) -> None:
    worker = TemplateWorker(TemplateLimits(deadline_s=60.0, fuel=2**31))
    lost: set[int] = set()
    has_ended = threading.Event()

    def strike() -> None:
        while not has_ended.wait(0.01):
            process = worker._process
            if process is not None and worker._is_ready and process.pid not in lost:
                lost.add(process.pid)
                process.send_signal(signum)

    worker.render("{{ 1 }}", {})
    striker = threading.Thread(target=strike)
    striker.start()
    try:
        with pytest.raises(HelperUnavailable, match="renders chat templates"):
            worker.render(SLOW, {})
    finally:
        has_ended.set()
        striker.join()
    assert len(lost) == 2
    assert worker.render("{{ 3 }}", {}) == "3"
    worker.close()


def test_a_closed_worker_starts_again_when_needed(worker: TemplateWorker) -> None:
    worker.close()
    worker.close()
    assert worker.render("{{ 3 }}", {}) == "3"


def test_no_process_or_pipe_is_left_after_many_kills() -> None:
    worker = TemplateWorker(TemplateLimits(deadline_s=0.02))
    worker.render("{{ 1 }}", {})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(TemplateError):
            worker.render("{% for i in range(3000) %}{% for j in range(3000) %}x{% endfor %}{% endfor %}", {})
    assert len(os.listdir("/proc/self/fd")) == before
    worker.close()


def test_threads_take_turns_and_each_gets_its_own_answer(worker: TemplateWorker) -> None:
    answers: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        answers[number] = [worker.render("{{ n }}-{{ i }}", {"n": number, "i": i}) for i in range(20)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [f"{number}-{i}" for i in range(20)] for number in range(8)}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_a_worker_of_its_own(worker: TemplateWorker) -> None:
    worker.render("{{ 1 }}", {})
    parents = worker._process
    child = os.fork()
    if child == 0:
        good = worker.render("{{ 7 }}", {}) == "7" and worker._process is not parents
        worker.close()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert worker._process is parents
    assert worker.render("{{ 8 }}", {}) == "8"


def test_the_process_has_one_shared_worker() -> None:
    assert shared_worker() is shared_worker()


def test_long_conversations_render(worker: TemplateWorker) -> None:
    messages = [{"role": "user", "content": "word " * 40} for _ in range(2000)]
    text = worker.render(
        "{% for m in messages %}{{ m.role }}: {{ m.content|trim }}\n{% endfor %}", {"messages": messages}
    )
    assert text.count("user: word") == 2000


def test_a_conversation_too_large_for_a_request_is_refused_with_its_size(worker: TemplateWorker) -> None:
    with pytest.raises(TemplateError, match=r"17,000,\d{3} bytes"):
        worker.render("{{ x }}", {"x": "a" * 17_000_000})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ true }} {{ false }} {{ [1, 'a', true] }}", "True False [1, 'a', True]"),
        ("{{ x|tojson }}", '{"a": "<é>&\'"}'),
        ("{{ x|tojson(indent=2) }}", '{\n  "a": "<é>&\'"\n}'),
        ("{{ undefined_name|length }}[{{ undefined_name }}]", "0[]"),
        ("{% generation %}\na{% endgeneration %}b", "ab"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{{ ' a '.strip() }}{{ 'a,b'.split(',')[-1] }}{{ 'abc'.startswith('ab') }}", "abTrue"),
        ("{% for k, v in x.items() %}{{ k }}={{ v }}{% endfor %}", "a=<é>&'"),
        ("{{ strftime_now('%Y')|length }}", "4"),
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
    ],
)
def test_templates_mean_what_they_mean_in_jinja2(worker: TemplateWorker, template: str, text: str) -> None:
    assert worker.render(template, {"x": {"a": "<é>&'"}}) == text
