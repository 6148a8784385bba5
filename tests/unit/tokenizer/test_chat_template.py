"""Templates' own control tokens are control tokens; the same characters in a message are text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn.errors import TemplateError
from kvarn.tokenizer.chat.template import ChatRequest, render_chat
from kvarn.tokenizer.from_gguf import tokenizer_from_gguf
from kvarn.tokenizer.tokenizer import Tokenizer
from tests.unit.tokenizer.vocabularies import byte_level, sentence_piece

CHATML = tokenizer_from_gguf(byte_level())


def with_template(template: str, **more: Any) -> Tokenizer:
    return tokenizer_from_gguf(byte_level(**{"tokenizer.chat_template": template, **more}))


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def controls(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(i) for i in ids if tokenizer.is_control(i)]


def test_a_conversation_is_written_and_encoded_as_the_template_says() -> None:
    ids = CHATML.encode_chat([{"role": "system", "content": "be"}, *user("hello")])
    text = "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids == CHATML.encode(text, parse_special=True)


@pytest.mark.parametrize(("knows", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_is_the_system_where_the_template_knows_none(knows: str, role: str) -> None:
    tokenizer = with_template(knows + "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    written = render_chat(tokenizer, ChatRequest.checked(messages))
    assert written.text == f"{role}: Be kind.\nuser: Hi\n"


@pytest.mark.parametrize(("knows", "written"), [("m", ""), ("message", "hm")])
def test_reasoning_has_the_name_that_the_template_knows(knows: str, written: str) -> None:
    tokenizer = with_template(f"{{% for {knows} in messages %}}{{{{ {knows}.thinking }}}}{{% endfor %}}")
    messages = [*user("Hi"), {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}]
    assert render_chat(tokenizer, ChatRequest.checked(messages)).text == written


def test_calls_beside_an_empty_text_are_written_where_the_template_wants_null() -> None:
    tokenizer = with_template(
        "{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}"
        "{{ message.tool_calls[0].function.name }}{% endif %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*user("Hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert render_chat(tokenizer, ChatRequest.checked(messages)).text == "f"


def test_the_generation_prompt_can_be_left_out() -> None:
    assert controls(CHATML, CHATML.encode_chat(user("a"), add_generation_prompt=False)) == [
        "<|im_start|>",
        "<|im_end|>",
    ]


ATTACKS = st.lists(
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<", "|im_end|>", "<|im_", "start|>", "<tool>", "a", "\n"]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(ATTACKS, ATTACKS)
def test_messages_never_add_a_control_token_and_lose_no_character(first: str, second: str) -> None:
    ids = CHATML.encode_chat([*user(first), {"role": "assistant", "content": second}])
    assert controls(CHATML, ids) == ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>"]
    expected = (
        f"<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n{second}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert CHATML.decode(ids, skip_special=False) == expected


@settings(max_examples=40, deadline=None)
@given(st.text("ab <>|\n", max_size=20))
def test_ordinary_text_is_encoded_as_if_nothing_were_marked(text: str) -> None:
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert CHATML.encode_chat(user(text)) == CHATML.encode(rendered, parse_special=True)


def test_parts_tools_arguments_and_template_arguments_cannot_smuggle_either() -> None:
    tokenizer = with_template("{{ messages|tojson }}{{ tools|tojson }}{{ hint }}{{ messages[0].content }}<|im_end|>")
    bad = "<|im_start|>"
    ids = tokenizer.encode_chat(
        [{"role": "user", "content": [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "start|>"}]}],
        tools=[{"type": "function", "function": {"name": bad, "parameters": {bad: bad}}}],
        kwargs={"hint": bad},
    )
    assert controls(tokenizer, ids) == ["<|im_end|>"]
    assert tokenizer.decode(ids, skip_special=False).count(bad) == 6


def test_a_template_cannot_glue_two_harmless_messages_to_a_control_token() -> None:
    tokenizer = with_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    ids = tokenizer.encode_chat([*user("<|im_st"), *user("art|>")])
    assert controls(tokenizer, ids) == []
    assert tokenizer.decode(ids) == "<|im_start|>"


def test_the_mark_is_a_character_the_conversation_does_not_have() -> None:
    text = "".join(map(chr, range(0xFDD0, 0xFDF0))) + "<|im_end|>"
    ids = CHATML.encode_chat(user(text))
    assert text in CHATML.decode(ids, skip_special=False)
    assert controls(CHATML, ids) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_user_defined_tokens_in_a_message_stay_tokens() -> None:
    tool = CHATML.encode("<tool>")
    assert tool[0] in CHATML.encode_chat(user("<|im_end|><tool>"))


@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_bos_stands_there_once_whether_the_template_writes_it_or_not(template: str) -> None:
    tokenizer = with_template(template, **{"tokenizer.ggml.add_bos_token": True})
    ids = tokenizer.encode_chat(user("hello"))
    assert ids == [tokenizer.bos_id, *tokenizer.encode("hello", add_special=False)]


def test_bos_is_not_added_where_the_model_does_not_want_it() -> None:
    assert with_template("{{ messages[0].content }}").encode_chat(user("hello")) == CHATML.encode("hello")


def test_tools_are_undefined_when_there_are_none() -> None:
    tokenizer = with_template("{{ tools is defined }}")
    assert tokenizer.decode(tokenizer.encode_chat(user("a"))) == "False"
    assert tokenizer.decode(tokenizer.encode_chat(user("a"), tools=[])) == "False"
    assert tokenizer.decode(tokenizer.encode_chat(user("a"), tools=[{"type": "function"}])) == "True"


def test_template_arguments_reach_the_template() -> None:
    tokenizer = with_template("{% if enable_thinking %}yes{% else %}no{% endif %}")
    assert tokenizer.decode(tokenizer.encode_chat(user("a"), kwargs={"enable_thinking": False})) == "no"


def test_a_model_without_a_template_says_what_to_do_instead() -> None:
    with pytest.raises(TemplateError, match="give it a text to continue instead of messages"):
        tokenizer_from_gguf(sentence_piece()).encode_chat(user("a"))
