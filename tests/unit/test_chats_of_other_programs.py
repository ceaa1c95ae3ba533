"""ChatGPT's exports and LM Studio's files: what is in them comes over, and what is damaged costs only itself."""

import base64
import json
import uuid
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.services.chat_store.json_format import NotAChatFileError, Whole
from app.services.chat_store.other_programs import LeftOut, from_chatgpt, from_lm_studio
from app.services.chat_store.reading import Unread, read_chats
from app.services.chat_store.tree import MessageTree

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def node(id_: str, parent: str | None, children: list[str], role: str = "", text: str = "", **more: Any) -> Any:
    message = {
        "id": id_,
        "author": {"role": role},
        "create_time": 1_700_000_000.5,
        "content": more.pop("content", {"content_type": "text", "parts": [text]}),
        "metadata": more.pop("metadata", {}),
        "recipient": more.pop("recipient", "all"),
    }
    return {"id": id_, "parent": parent, "children": children, "message": message if role else None}


def conversation(number: int = 0, **more: Any) -> dict[str, Any]:
    """With a hidden system message, a call of a tool, thoughts, and two versions of an answer."""
    code = {"content_type": "code", "language": "python", "text": "1+1"}
    thoughts = {"content_type": "thoughts", "thoughts": [{"summary": "Adding", "content": "One and one."}]}
    hidden = {"is_visually_hidden_from_conversation": True}
    gpt = {"model_slug": "gpt-4o"}
    return {
        "title": f"Sum {number}",
        "create_time": 1_690_000_000.0,
        "update_time": 1_700_000_100.0,
        "conversation_id": f"c{number}",
        "current_node": "a1",
        "mapping": {
            "root": node("root", None, ["sys"]),
            "sys": node("sys", "root", ["q"], "system", "", metadata=hidden),
            "q": node("q", "sys", ["call", "a2"], "user", "One and one?"),
            "call": node("call", "q", ["result"], "assistant", content=code, recipient="python"),
            "result": node("result", "call", ["think"], "tool", "2"),
            "think": node("think", "result", ["a1"], "assistant", content=thoughts),
            "a1": node("a1", "think", ["q2"], "assistant", "Two.", metadata=gpt),
            "a2": node("a2", "q", [], "assistant", "Three.", metadata=gpt),
            "q2": node("q2", "a1", [], "user", "Sure?"),
        },
        **more,
    }


def read(path: Path) -> tuple[list[Whole], Unread]:
    unread = Unread()
    return list(read_chats([path], unread, lambda _share: None, lambda: False)), unread


def said(chat: Whole) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in MessageTree(chat[1]).path()]


def test_chatgpts_dates_branches_and_thoughts_are_kept() -> None:
    (chat, messages), left = from_chatgpt(conversation())
    assert (chat.title, chat.created_at, chat.updated_at) == ("Sum 0", 1_690_000_000.0, 1_700_000_100.0)
    assert said((chat, messages)) == [("user", "One and one?"), ("assistant", "Two."), ("user", "Sure?")]
    tree = MessageTree(messages)
    answer = tree.path()[1]
    assert tree.versions(answer.id) == (1, 2)
    assert (answer.model, answer.reasoning) == ("gpt-4o", "Adding\n\nOne and one.")
    assert {m.created_at for m in messages} == {1_700_000_000.5}
    assert +left == {LeftOut.TOOLS: 2}


def test_an_export_imported_again_has_the_same_ids() -> None:
    one, two = from_chatgpt(conversation())[0], from_chatgpt(conversation())[0]
    assert one == two
    assert one[0].id != from_chatgpt(conversation(1))[0][0].id


def test_pictures_of_an_export_come_along_or_are_counted(tmp_path: Path) -> None:
    parts = {
        "content_type": "multimodal_text",
        "parts": [
            {"content_type": "image_asset_pointer", "asset_pointer": "file-service://file-abc1"},
            {"content_type": "image_asset_pointer", "asset_pointer": "sediment://file_gone2"},
            "What is this?",
        ],
    }
    whole = conversation(mapping={"q": node("q", None, [], "user", content=parts)}, current_node="q")
    file = tmp_path / "export.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("conversations.json", json.dumps([whole]))
        archive.writestr("file-abc1-photo.png", PNG)
        archive.writestr("user.json", "{}")
    ((_, messages),), unread = read(file)
    assert [picture.media for picture in messages[0].pictures] == ["image/png"]
    assert "What is this?" in messages[0].content
    assert +unread.left == {LeftOut.PICTURES: 1}


def test_lm_studios_versions_thoughts_and_figures_are_kept(tmp_path: Path) -> None:
    text = [{"type": "text", "text": "Hello"}]
    stats = {"stopReason": "eosFound", "tokensPerSecond": 12.5, "predictedTokensCount": 7, "promptTokensCount": 3}
    info = {"identifier": "qwen3-30b", "stats": stats}
    thinking = {"type": "contentBlock", "style": {"type": "thinking"}, "content": [{"type": "text", "text": "Hm."}]}
    answer = {"type": "contentBlock", "stepIdentifier": "1723642881461-0.9", "content": text, "genInfo": info}
    other = {"role": "assistant", "type": "multiStep", "steps": [{"type": "contentBlock", "content": text}]}
    raw = {
        "name": "Greeting",
        "createdAt": 1723642853043,
        "pinned": True,
        "systemPrompt": "Be kind.",
        "messages": [
            {
                "versions": [{"type": "singleStep", "role": "user", "content": [*text, {"type": "file"}]}],
                "currentlySelected": 0,
            },
            {
                "versions": [
                    other,
                    {
                        "role": "assistant",
                        "type": "multiStep",
                        "steps": [thinking, answer, {"type": "debugInfoBlock"}],
                    },
                ],
                "currentlySelected": 1,
            },
            {"versions": [{"type": "singleStep", "role": "user", "content": text}], "currentlySelected": 0},
        ],
    }
    file = tmp_path / "1723642853043.conversation.json"
    file.write_text(json.dumps(raw), encoding="utf-8")
    ((chat, messages),), unread = read(file)
    assert (chat.title, chat.created_at, chat.pinned, chat.system_prompt) == (
        "Greeting",
        1723642853.043,
        True,
        "Be kind.",
    )
    assert said((chat, messages)) == [("user", "Hello"), ("assistant", "Hello"), ("user", "Hello")]
    shown = MessageTree(messages).path()[1]
    assert (shown.model, shown.reasoning, shown.created_at) == ("qwen3-30b", "Hm.", 1723642881.461)
    assert (shown.stats.generated_tokens, shown.stats.tokens_per_s) == (7, 12.5)
    assert MessageTree(messages).versions(shown.id) == (2, 2)
    assert +unread.left == {LeftOut.FILES: 1}


@pytest.mark.parametrize("share", [0.2, 0.5, 0.99])
def test_what_comes_before_the_end_of_a_cut_off_export_is_read(tmp_path: Path, share: float) -> None:
    text = json.dumps([conversation(n) for n in range(40)])
    file = tmp_path / "conversations.json"
    file.write_text(text[: int(len(text) * share)], encoding="utf-8")
    chats, unread = read(file)
    assert abs(len(chats) - 40 * share) < 1.01
    assert unread.is_cut_off


@pytest.mark.parametrize("wrong", ['"Sum 7" "', '"Sum 7"}', '"Sum 7"]]]', "Sum 7", '"Sum 7'])
def test_a_damaged_chat_costs_only_itself(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "conversations.json"
    text = json.dumps([conversation(n) for n in range(20)])
    file.write_text(text.replace('"Sum 7"', wrong), encoding="utf-8")
    chats, unread = read(file)
    assert [chat.title for chat, _ in chats] == [f"Sum {n}" for n in range(20) if n != 7]
    assert unread.damaged == 1
    assert not unread.problems


def test_texts_longer_than_a_piece_are_read(tmp_path: Path) -> None:
    long = '\\"}]{[' * 2_000_000
    mapping = {"q": node("q", None, [], "user", long)}
    file = tmp_path / "conversations.json"
    file.write_text(
        json.dumps([conversation(n, mapping=mapping, current_node="q") for n in range(2)]), encoding="utf-8"
    )
    chats, unread = read(file)
    assert [len(messages[0].content) for _, messages in chats] == [len(long)] * 2
    assert not unread.damaged


def test_an_archive_that_claims_too_much_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bomb.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("conversations.json", bytes(2**20))
    file.write_bytes(file.read_bytes().replace((2**20).to_bytes(4, "little"), (2**31).to_bytes(4, "little")))
    chats, unread = read(file)
    assert not chats
    assert "claims" in unread.problems[0][1]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_what_comes_before_the_end_of_a_cut_off_zip_is_read(tmp_path: Path, share: float) -> None:
    whole = tmp_path / "whole.zip"
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("chat.html", "<html>" * 100)
        made = [conversation(n, key=uuid.uuid4().hex * 50) for n in range(200)]  # which does not pack well
        archive.writestr("export/conversations.json", json.dumps(made))
    file = tmp_path / "cut.zip"
    content = whole.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    chats, unread = read(file)
    assert 200 * share * 0.5 < len(chats) < 200
    assert unread.is_cut_off
    assert [chat.title for chat, _ in chats] == [f"Sum {n}" for n in range(len(chats))]


def test_an_import_stops_when_it_is_cancelled(tmp_path: Path) -> None:
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps([conversation(n) for n in range(20)]), encoding="utf-8")
    got: list[Whole] = []
    got.extend(read_chats([file], Unread(), lambda _share: None, lambda: len(got) == 3))
    assert len(got) == 3


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
def test_no_part_may_be_taken_for_granted(data: st.DataObject) -> None:
    """One part of a sound conversation is anything at all: it is read, or it is refused."""

    def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(place for key, inner in inside for place in places(inner, (*path, key)))]

    whole = conversation()
    place = data.draw(st.sampled_from([each for each in places(whole) if each and each != ("mapping",)]))
    holder: Any = whole
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = data.draw(json_values)
    try:
        (chat, messages), _ = from_chatgpt(whole)
    except NotAChatFileError:
        return
    tree = MessageTree(messages)
    assert len(tree) == len(messages)
    assert {m.conversation_id for m in messages} == {chat.id}


@given(json_values)
def test_lm_studios_parts_may_be_anything(value: Any) -> None:
    version = {"role": "assistant", "content": value, "steps": [value, {"type": "contentBlock", "content": value}]}
    for raw in (
        {"messages": [value]},
        {"messages": [{"versions": value}]},
        {"messages": [{"versions": [version, value], "currentlySelected": value}], "createdAt": value, "name": value},
    ):
        try:
            (_, messages), _ = from_lm_studio(raw, "1")
        except NotAChatFileError:
            continue
        assert len(MessageTree(messages)) == len(messages)


def test_nodes_that_go_in_circles_are_read_once() -> None:
    mapping = {"a": node("a", "b", ["b"], "user", "one"), "b": node("b", "a", ["a"], "assistant", "two")}
    (_, messages), _ = from_chatgpt(conversation(mapping=mapping, current_node="a"))
    assert sorted(m.content for m in messages) == ["one", "two"]
