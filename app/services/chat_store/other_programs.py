"""Chats of other programs: ChatGPT's export and LM Studio's files, with their dates, versions and branches.

Neither format is documented, and both change: nothing is taken for granted, and what is not understood is left out and
counted. Ids are made from what the other program calls the same thing, so that a chat that is imported again is
recognised.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Any

from app.services.chat_store.json_format import NotAChatFileError, Whole
from app.services.chat_store.records import AnswerStats, Conversation, Message, clean_text, made_id
from app.services.chat_store.tree import sound
from engine.common.chat import Picture

_LAST_MOMENT = 2.0**32
_TITLE_CHARACTERS = 60
_NO_PICTURE = "[a picture that is not in the export]"


class LeftOut(StrEnum):
    TOOLS = "tools"
    PICTURES = "pictures"
    FILES = "files"
    SETTINGS = "settings"
    EMPTY = "empty"
    OTHER = "other"


FindPicture = Callable[[str], Picture | None]
"""The picture with an id of the other program's, if its file came along."""


# --- ChatGPT ----------------------------------------------------------------------------------------


def is_from_chatgpt(raw: object) -> bool:
    return isinstance(raw, dict) and isinstance(raw.get("mapping"), dict)


def from_chatgpt(raw: dict[str, Any], find: FindPicture = lambda _id: None) -> tuple[Whole, Counter[LeftOut]]:
    """One conversation of `conversations.json`: a tree of nodes, of which many hold nothing that a person sees.

    Raises:
        NotAChatFileError: it has no messages that could be read.
    """
    nodes: dict[str, Any] = {key: node for key, node in raw["mapping"].items() if isinstance(node, dict)}
    named = _text(raw.get("conversation_id")) or _text(raw.get("id"))
    created, updated = _moment(raw.get("create_time")), _moment(raw.get("update_time"))
    id_ = made_id("chatgpt", named or f"{created}/{_text(raw.get('title'))}/{min(nodes, default='')}")
    left: Counter[LeftOut] = Counter()
    on_path = _path_to(_text(raw.get("current_node")), nodes)
    above: dict[str, tuple[str | None, str]] = {}
    """By node: the nearest message that is kept, itself or before it, and what was thought since then."""
    kept: list[Message] = []
    system = ""
    for key in _in_order(nodes):
        parent, thought = above.get(_text(nodes[key].get("parent")), (None, ""))
        message = nodes[key].get("message")
        turn = _chatgpt_turn(message, left, find) if isinstance(message, dict) else None
        if turn is None or not (turn[1] or turn[2] or turn[3]):
            above[key] = (parent, thought)
            continue
        role, content, reasoning, pictures = turn
        if role == "system":
            system, above[key] = system or content, (parent, thought)
            continue
        reasoning = "\n\n".join(filter(None, (thought, reasoning)))
        if role == "assistant" and not content:
            above[key] = (parent, reasoning)
            continue
        assert isinstance(message, dict)
        metadata = message.get("metadata")
        model = _text(metadata.get("model_slug")) if role == "assistant" and isinstance(metadata, dict) else ""
        kept.append(
            Message(
                made_id(id_, key),
                id_,
                parent,
                "user" if role == "user" else "assistant",
                content,
                model=model or (_text(raw.get("default_model_slug")) if role == "assistant" else ""),
                created_at=_moment(message.get("create_time")) or created,
                chosen=key in on_path,
                reasoning=reasoning if role == "assistant" else "",
                pictures=pictures if role == "user" else (),
            )
        )
        above[key] = (kept[-1].id, "")
    if not kept:
        raise NotAChatFileError("it has no messages")
    return _whole(id_, _text(raw.get("title")), created, updated, kept, system=system), left


def _in_order(nodes: dict[str, Any]) -> Iterator[str]:
    """Parents before children, versions in their order; each node once, whatever they say of each other."""
    begun: set[str] = set()
    roots = [key for key, node in nodes.items() if _text(node.get("parent")) not in nodes]
    for root in (*roots, *nodes):  # the second time round for what only circles lead to
        waiting = [root]
        while waiting:
            key = waiting.pop()
            if key in begun:
                continue
            begun.add(key)
            yield key
            children = nodes[key].get("children")
            below = [child for child in children if isinstance(child, str)] if isinstance(children, list) else []
            waiting += [child for child in reversed(below) if child in nodes and child not in begun]


def _path_to(leaf: str, nodes: dict[str, Any]) -> set[str]:
    path: set[str] = set()
    while leaf in nodes and leaf not in path:
        path.add(leaf)
        leaf = _text(nodes[leaf].get("parent"))
    return path


_Turn = tuple[str, str, str, tuple[Picture, ...]]


def _chatgpt_turn(message: dict[str, Any], left: Counter[LeftOut], find: FindPicture) -> _Turn | None:
    """Role, text, thought and pictures; None for what a person never saw, or what is left out."""
    author, content = message.get("author"), message.get("content")
    metadata = message.get("metadata") if isinstance(message.get("metadata"), dict) else {}
    if not isinstance(author, dict) or not isinstance(content, dict) or not isinstance(metadata, dict):
        return None
    role, kind = _text(author.get("role")), _text(content.get("content_type"))
    hidden = bool(metadata.get("is_visually_hidden_from_conversation"))
    if role == "system":
        return None if hidden or kind != "text" else ("system", _parts(content, left, find)[0], "", ())
    if kind == "thoughts":
        thoughts = content.get("thoughts")
        said = [each for each in thoughts if isinstance(each, dict)] if isinstance(thoughts, list) else []
        lines = ("\n\n".join(filter(None, (_text(e.get("summary")), _text(e.get("content"))))) for e in said)
        return ("assistant", "", "\n\n".join(filter(None, lines)), ())
    if hidden or kind in ("reasoning_recap", "model_editable_context", "user_editable_context"):
        return None
    if role == "tool" or _text(message.get("recipient")) not in ("", "all"):
        if isinstance(content.get("parts"), list):  # a picture that was drawn, say
            left[LeftOut.PICTURES] += sum(isinstance(part, dict) for part in content["parts"])
        left[LeftOut.TOOLS] += 1
        return None
    if role not in ("user", "assistant"):
        return None
    if kind == "code":
        return (
            role,
            f"```{_text(content.get('language')).replace('unknown', '')}\n{_text(content.get('text'))}\n```",
            "",
            (),
        )
    if kind in ("text", "multimodal_text"):
        attached = metadata.get("attachments")
        named = [each for each in attached if isinstance(each, dict)] if isinstance(attached, list) else []
        left[LeftOut.FILES] += sum(not _text(each.get("mime_type")).startswith("image/") for each in named)
        text, pictures = _parts(content, left, find)
        if role != "user":
            left[LeftOut.PICTURES] += len(pictures)
        return (role, text, "", pictures)
    if _text(content.get("text")):
        return (role, _text(content.get("text")), "", ())
    left[LeftOut.OTHER] += 1
    return None


def _parts(content: dict[str, Any], left: Counter[LeftOut], find: FindPicture) -> tuple[str, tuple[Picture, ...]]:
    parts = content.get("parts")
    texts: list[str] = []
    pictures: list[Picture] = []
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, str):
            texts.append(clean_text(part))
        elif isinstance(part, dict) and part.get("content_type") == "image_asset_pointer":
            picture = find(_text(part.get("asset_pointer")).rpartition("/")[2])
            if picture is None:
                left[LeftOut.PICTURES] += 1
                texts.append(_NO_PICTURE)
            else:
                pictures.append(picture)
        elif isinstance(part, dict) and _text(part.get("text")):  # what was spoken
            texts.append(_text(part.get("text")))
        elif part is not None:
            left[LeftOut.OTHER] += 1
    return "\n\n".join(text for text in texts if text.strip()), tuple(pictures)


# --- LM Studio --------------------------------------------------------------------------------------


def is_from_lm_studio(raw: object) -> bool:
    if not isinstance(raw, dict) or not isinstance(raw.get("messages"), list) or "format" in raw:
        return False
    return not raw["messages"] or any(isinstance(each, dict) and "versions" in each for each in raw["messages"])


def from_lm_studio(raw: dict[str, Any], stem: str) -> tuple[Whole, Counter[LeftOut]]:
    """One conversation: turns, each with its versions, of which the selected one goes on.

    Args:
        stem: what its file is called; its id is nowhere else.

    Raises:
        NotAChatFileError: it has no messages that could be read.
    """
    created = _moment(raw.get("createdAt"), thousandths=True)
    id_ = made_id("lm-studio", stem if stem.isdigit() else str(raw.get("createdAt") or stem))
    left: Counter[LeftOut] = Counter()
    kept: list[Message] = []
    parent: str | None = None
    at = created
    for number, turn in enumerate(raw["messages"]):
        versions = turn.get("versions") if isinstance(turn, dict) else None
        if not isinstance(versions, list):
            left[LeftOut.OTHER] += 1
            continue
        selected = turn.get("currentlySelected")
        beside: list[Message] = []
        chosen: str | None = None
        for place, version in enumerate(versions):
            if not isinstance(version, dict):
                left[LeftOut.OTHER] += 1
                continue
            message = _lm_studio_turn(version, left)
            if message is None:
                continue
            at = max(at, message.created_at)
            # From its text too: an edited turn is another one when the chat is imported again.
            key = made_id(id_, parent or "", f"{number}/{place}", message.content)
            beside.append(
                replace(message, id=key, conversation_id=id_, parent_id=parent, created_at=message.created_at or at)
            )
            chosen = key if place == selected or chosen is None else chosen
        if beside:
            kept += [replace(message, chosen=message.id == chosen) for message in beside]
            parent = chosen
    if not kept:
        raise NotAChatFileError("it has no messages")
    left[LeftOut.FILES] += sum(len(raw[name]) for name in ("looseFiles",) if isinstance(raw.get(name), list))
    if _fields(raw.get("perChatPredictionConfig")):
        left[LeftOut.SETTINGS] += 1
    updated = max(_moment(raw.get(f"{who}LastMessagedAt"), thousandths=True) for who in ("user", "assistant"))
    system = _fields(raw.get("perChatPredictionConfig")).get("llm.prediction.systemPrompt") or raw.get("systemPrompt")
    title, pinned = _text(raw.get("name")), bool(raw.get("pinned"))
    return _whole(id_, title, created, updated, kept, system=_text(system), pinned=pinned), left


def _fields(config: object) -> dict[str, Any]:
    fields = config.get("fields") if isinstance(config, dict) else None
    entries = [each for each in fields if isinstance(each, dict)] if isinstance(fields, list) else []
    return {_text(each.get("key")): each.get("value") for each in entries}


def _lm_studio_turn(version: dict[str, Any], left: Counter[LeftOut]) -> Message | None:
    role = version.get("role")
    if role not in ("user", "assistant"):
        left[LeftOut.OTHER] += 1
        return None
    texts, thoughts = [_lm_studio_text(version.get("content"), left)], [""]
    steps = version.get("steps")
    at, model, stats = 0.0, "", None
    for step in steps if isinstance(steps, list) else ():
        kind = step.get("type") if isinstance(step, dict) else None
        if kind == "debugInfoBlock":
            continue
        if not isinstance(step, dict) or kind != "contentBlock":
            left[LeftOut.TOOLS if "tool" in str(kind).lower() else LeftOut.OTHER] += 1
            continue
        style = step.get("style")
        is_thought = isinstance(style, dict) and style.get("type") == "thinking"
        (thoughts if is_thought else texts).append(_lm_studio_text(step.get("content"), left))
        begun = re.match(r"\d{12,14}(?=-)", _text(step.get("stepIdentifier")))
        at = at or (_moment(int(begun[0]), thousandths=True) if begun else 0.0)
        info = step.get("genInfo")
        if isinstance(info, dict):
            model = _text(info.get("identifier")) or _text(info.get("indexedModelIdentifier"))
            stats = _lm_studio_stats(info.get("stats"))
    sender = version.get("senderInfo")
    if role == "assistant" and not model and isinstance(sender, dict):
        model = _text(sender.get("senderName"))
    content, reasoning = ("\n\n".join(filter(str.strip, some)) for some in (texts, thoughts))
    if not content and not reasoning:
        return None
    answers = role == "assistant"
    return Message(
        "",
        "",
        None,
        "assistant" if answers else "user",
        content,
        created_at=at,
        model=model if answers else "",
        stats=stats if answers else None,
        reasoning=reasoning if answers else "",
    )


def _lm_studio_text(content: object, left: Counter[LeftOut]) -> str:
    texts: list[str] = []
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind == "text":
            texts.append(_text(part.get("text")))
        elif isinstance(part, dict) and kind == "file":
            left[LeftOut.PICTURES if part.get("fileType") == "image" else LeftOut.FILES] += 1
        else:
            left[LeftOut.TOOLS if "tool" in str(kind).lower() else LeftOut.OTHER] += 1
    return "".join(texts).strip("\n")


def _lm_studio_stats(raw: object) -> AnswerStats | None:
    if not isinstance(raw, dict):
        return None

    def figure(name: str) -> float:
        value = raw.get(name)
        return float(value) if isinstance(value, int | float) and 0 <= value < 1e9 else 0.0

    return AnswerStats(
        finish_reason="length" if raw.get("stopReason") == "maxPredictedTokensReached" else "stop",
        prompt_tokens=int(figure("promptTokensCount")),
        generated_tokens=int(figure("predictedTokensCount")),
        ttft_s=figure("timeToFirstTokenSec"),
        tokens_per_s=figure("tokensPerSecond"),
    )


# --- both -------------------------------------------------------------------------------------------


def _whole(
    id_: str,
    title: str,
    created: float,
    updated: float,
    messages: list[Message],
    *,
    system: str = "",
    pinned: bool = False,
) -> Whole:
    times = [message.created_at for message in messages if message.created_at]
    created = created or min(times, default=0.0)
    words = " ".join((title or next((m.content for m in messages if m.role == "user"), "")).split())
    conversation = Conversation(
        id_,
        title=words if len(words) <= _TITLE_CHARACTERS or title else f"{words[: _TITLE_CHARACTERS - 1]}…",
        pinned=pinned,
        created_at=created,
        updated_at=max((updated, created, *times)),
        system_prompt=system,
    )
    return conversation, sound(_last_shown(messages))


def _last_shown(messages: list[Message]) -> list[Message]:
    """Where none of a turn's versions is said to be shown, the last is, as in the other programs."""
    said = {message.parent_id for message in messages if message.chosen}
    return [message if message.parent_id in said else replace(message, chosen=True) for message in messages]


def _text(value: object) -> str:
    return clean_text(value) if isinstance(value, str) else ""


def _moment(value: object, *, thousandths: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    try:
        seconds = float(value) / 1000 if thousandths else float(value)
    except OverflowError:
        return 0.0
    return seconds if math.isfinite(seconds) and 0 <= seconds < _LAST_MOMENT else 0.0
