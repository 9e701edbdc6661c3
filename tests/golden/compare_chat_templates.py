#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Chat templates from elsewhere, rendered by transformers over many conversations, as cases for chat_template_test.

    compare_chat_templates.py FOLDER CASES.json       # FOLDER/*.jinja; needs transformers 5.24 and jinja2
    DS_CHAT_TEMPLATES=CASES.json build/ci/bin/unit_test --gtest_filter='ChatTemplate.Published*'

Published templates have licences of their own and are not part of libds. llama.cpp has many of them in models/templates,
and TRL in trl/chat_templates.
"""

import datetime
import itertools
import json
import pathlib
import sys

import jinja2
from transformers.utils import chat_template_utils

NOW = 1753963200  # 2025-07-31 12:00:00 UTC
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place, \"now\".\nIn <b>words</b> & numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name, e.g. Zürich"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "array", "items": {"type": "integer"}, "description": "offsets"},
                "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
            },
            "required": ["city"],
        },
        "return": {"type": "string"},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}}}
BARE = {"name": "bare", "description": "no wrapper", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}

SYSTEM = {"role": "system", "content": "Be brief.\n"}
USER = {"role": "user", "content": "Hi there"}
ANSWER = {"role": "assistant", "content": "Hello!"}


def call(arguments, identifier="call12345", name="get_weather"):
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


ARGUMENTS = {"city": "Zürich", "days": [1, 2], "where": {"lat": 47.37}, "flag": True, "none": None, "big": 1e21}
CALLING = {"role": "assistant", "content": "", "tool_calls": [call(ARGUMENTS)]}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": "{\"temp\": 21.5}"}

CONVERSATIONS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": " And\nnow? "}],
    "answered": [USER, ANSWER],
    "many": [SYSTEM] + [USER, ANSWER] * 5 + [USER],
    "unicode": [{"role": "user", "content": "Grüße 你好 🎉 \u00a0 \u200b e\u0301 ß İ"}, {"role": "assistant", "content": "\u3000好\u3000"}, USER],
    "blanks": [{"role": "system", "content": "  "}, {"role": "user", "content": "\n\n  x  \n"}, {"role": "assistant", "content": "\t y\n\n"}, USER],
    "empty": [{"role": "system", "content": ""}, {"role": "user", "content": ""}, {"role": "assistant", "content": ""}, {"role": "user", "content": ""}],
    "null": [USER, {"role": "assistant", "content": None}, USER],
    "no-content": [USER, {"role": "assistant"}, USER],
    "no-role": [USER, {"content": "who?"}],
    "other-role": [{"role": "developer", "content": "Do it."}, USER, {"role": "critic", "content": "Hm."}],
    "assistant-first": [ANSWER, USER],
    "assistant-only": [ANSWER],
    "system-only": [SYSTEM],
    "two-users": [USER, USER],
    "two-systems": [SYSTEM, USER, SYSTEM, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Look "}, {"type": "image"}, {"type": "text", "text": "here"}]}, {"role": "assistant", "content": [{"type": "text", "text": "I see"}]}, USER],
    "think": [USER, {"role": "assistant", "content": "<think>\nLong thought\n</think>\n\nHello!"}, USER],
    "reasoning": [USER, {"role": "assistant", "content": "Hello!", "reasoning_content": "A thought. "}, USER, ANSWER],
    "thinking-field": [USER, {"role": "assistant", "thinking": "Older name.", "content": "Hello!"}],
    "call": [SYSTEM, USER, CALLING, RESULT],
    "call-text": [USER, dict(CALLING, content="Let me see."), RESULT, {"role": "assistant", "content": "21.5 degrees"}, USER],
    "call-string": [USER, {"role": "assistant", "content": None, "tool_calls": [call("{\"city\": \"Bern\"}")]}, RESULT],
    "call-none": [USER, {"role": "assistant", "tool_calls": [call(ARGUMENTS)]}, RESULT, ANSWER],
    "calls": [USER, {"role": "assistant", "content": "", "tool_calls": [call({"city": "Bern"}, "abcdefghi"), call({}, "123456789", "clock")]}, dict(RESULT, tool_call_id="abcdefghi"), dict(RESULT, tool_call_id="123456789", name="clock", content="12:00"), ANSWER, USER],
    "call-reasoning": [SYSTEM, USER, dict(CALLING, reasoning_content="I need the weather."), RESULT, {"role": "assistant", "reasoning_content": "Done.", "content": "Warm."}],
    "empty-calls": [USER, {"role": "assistant", "content": "No.", "tool_calls": []}],
    "result-parts": [USER, CALLING, dict(RESULT, content=[{"type": "text", "text": "warm"}])],
    "result-object": [USER, CALLING, dict(RESULT, content={"temp": 21.5, "ok": True})],
    "markup": [{"role": "user", "content": "<|im_end|> {{ 7*7 }} {% raw %} [INST] <s> & \"quotes\" 'single'"}, ANSWER, USER],
}
DOCUMENTS = [{"title": "One", "text": "First text."}, {"title": "Zwei", "text": "Zweiter\nText.", "extra": 1}]
SETTINGS = [
    {},
    {"add_generation_prompt": True},
    {"continue_final_message": True},
    {"tools": [WEATHER, CLOCK], "add_generation_prompt": True},
    {"tools": [WEATHER]},
    {"tools": [BARE]},
    {"tools": []},
    {"documents": DOCUMENTS, "add_generation_prompt": True},
    {"variables": {"enable_thinking": False}, "add_generation_prompt": True},
    {"variables": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}, "add_generation_prompt": True},
    {"variables": {"date_string": "31 Jul 2025", "tools_in_user_message": False, "builtin_tools": ["browser", "python"]}, "tools": [WEATHER]},
]


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, tz)


def render(template, messages, setting):
    """A case with the text, or the kind of the error."""
    case = {"messages": messages, **setting}
    given = dict(setting)
    variables = given.pop("variables", {})
    try:
        # As apply_chat_template calls it.
        chat = [chat_template_utils._normalize_chat_messages(messages)]
        if not messages:
            raise ValueError("empty")
        if given.get("continue_final_message") and given.get("add_generation_prompt"):
            raise ValueError("both")
        rendered, _ = chat_template_utils.render_jinja_template(
            conversations=chat, chat_template=template, **given, **{**SPECIAL_TOKENS, **variables})
        case["text"] = rendered[0]
        case["text"].encode()
    except RecursionError:
        raise
    except Exception as error:  # templates raise whatever Python raises
        case.pop("text", None)
        case["error"] = f"{type(error).__name__}: {error}"[:200]
    return case


def collection(templates, cases):
    return {"now": NOW, "special_tokens": SPECIAL_TOKENS, "templates": templates, "cases": cases}


def main():
    folder, out = map(pathlib.Path, sys.argv[1:])
    chat_template_utils.datetime = Clock
    templates, cases = {}, []
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        try:
            chat_template_utils._compile_jinja_template(source)
        except jinja2.TemplateSyntaxError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
        templates[path.name] = source
        for (name, messages), setting in itertools.product(CONVERSATIONS.items(), SETTINGS):
            cases.append({"template": path.name, "name": name, **render(source, messages, setting)})
    out.write_text(json.dumps(collection(templates, cases)), encoding="utf-8")
    print(f"{len(templates)} templates, {len(cases)} cases, {sum('error' in case for case in cases)} of them errors")


if __name__ == "__main__":
    main()
