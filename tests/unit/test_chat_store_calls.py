"""Calls of tools are kept with their answers: in the file, in exports, and when the file is damaged."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from app.services.chat_store.database import ChatDatabase
from app.services.chat_store.json_format import from_json, from_markdown, to_json, to_markdown
from app.services.chat_store.records import (
    Conversation,
    Message,
    Step,
    ToolUse,
    steps_from_json,
    steps_to_json,
)
from app.services.chat_store.schema import connect, migrate

STEPS = (
    Step("I look.", "Hm.", (ToolUse("1", "search", '{"q": "a"}', "found <b>\n<!-- x -->", "done", "web", 1.5),)),
    Step("", "", (ToolUse("2", "search", "{}", "The user did not allow this call.", "denied", "web"),)),
)
CHAT = Conversation("c", title="Tools", tools='["web/search"]')
QUESTION = Message("q", "c", None, "user", "When?")
ANSWER = Message("a", "c", "q", "assistant", "At nine.", reasoning="So.", steps=STEPS)


def test_they_are_kept_in_the_file(tmp_path: Path) -> None:
    connection = connect(tmp_path / "chats.sqlite")
    migrate(connection)
    with closing(ChatDatabase(connection)) as database:
        database.add_conversations([(CHAT, [QUESTION, replace(ANSWER, steps=())])])
        database.set_steps(ANSWER)
        assert database.messages("c")[1] == ANSWER
        assert database.conversations()[0].tools == CHAT.tools


def test_exports_hold_them_and_imports_allow_nothing() -> None:
    ((chat, messages),), damaged = from_json(json.loads(to_json([(CHAT, [QUESTION, ANSWER])])))
    assert damaged == 0
    assert messages[1].steps == STEPS
    assert chat.tools == "[]"  # what may run unasked is not for a file to say
    text = to_markdown(CHAT, [QUESTION, ANSWER])
    assert "<summary>search" in text
    assert "found" in text
    _chat, read = from_markdown(text)
    assert [(turn.role, turn.content, turn.reasoning) for turn in read] == [
        ("user", "When?", ""),
        ("assistant", "At nine.", "So."),
    ]


def test_what_is_no_call_is_left_out() -> None:
    assert steps_from_json(steps_to_json(STEPS)) == STEPS
    for text in ("", "x", "[]", "{}", '{"steps": 1}', '{"steps": [1, {"calls": 1}]}'):
        assert steps_from_json(text) == ()
    odd = {"steps": [{"text": 1, "calls": [{"id": "1", "name": "x", "state": "exploded"}, {"id": 1}]}]}
    assert steps_from_json(json.dumps(odd)) == (Step(),)
