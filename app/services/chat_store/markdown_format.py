"""Chats as Markdown: the visible path, readable anywhere, and importable again.

Each turn starts with a comment line that a viewer hides, an answer's heading says which model gave it and where, and
reasoning is a section that viewers fold; a line of a message that looks like such a comment is escaped with a
backslash.  Markdown from other programs is split at its headings ("## You", "## Assistant").
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from app.services.chat_store.json_format import NotAChatFileError, Whole
from app.services.chat_store.records import Conversation, Message, MessageState, clean_text, made_id, shown_sources
from engine.protocol import Role

_MARK = "<!-- switchyard:"
_HEADINGS: dict[Role, str] = {"system": "System prompt", "user": "You", "assistant": "Assistant"}
_TURN = re.compile(r"^<!-- switchyard:(system|user|assistant) -->\n## (?:Assistant: ([^\n]+)|[^\n]*)\n\n", re.MULTILINE)
_THOUGHT = re.compile(
    r"<!-- switchyard:thought ([0-9]{1,12}(?:\.[0-9]{1,9})?) -->\n<details>\n<summary>[^\n]*</summary>\n\n"
    r"(.*?)\n\n</details>\n<!-- switchyard:answer -->\n\n",
    re.DOTALL,
)
_SHOWN = re.compile(r"<!-- switchyard:pictures -->\n(?:[^\n]*\n)*?<!-- switchyard:text -->\n\n")
_FOREIGN = re.compile(r"^#{1,6}[ \t]*(you|user|human|assistant|system|system prompt)[ \t]*:?[ \t]*\r?$", re.I | re.M)
_FOREIGN_ROLES: dict[str, Role] = {"assistant": "assistant", "system": "system", "system prompt": "system"}


@dataclass(frozen=True, slots=True)
class _Read:
    role: Role
    content: str
    reasoning: str = ""
    reasoning_s: float = 0.0
    model: str = ""


def to_markdown(conversation: Conversation, path: Iterable[Message]) -> str:
    title = " ".join(conversation.title.split()) or "Chat"
    parts = [f"# {title}\n\n"]
    if conversation.system_prompt:
        parts.append(_turn("system", conversation.system_prompt))
    for message in path:
        by = " ".join(message.model.split()) if message.role == "assistant" else ""
        parts.append(_turn(message.role, message.content, _shown(message) + _folded(message), by))
    return "".join(parts)


def _turn(role: Role, content: str, before: str = "", by: str = "") -> str:
    heading = f"{_HEADINGS[role]}: {by}" if by else _HEADINGS[role]
    return f"{_MARK}{role} -->\n## {heading}\n\n{before}{_escaped(content)}\n\n"


def _folded(message: Message) -> str:
    if not message.reasoning:
        return ""
    summary = f"<summary>Thought for {message.reasoning_s:.0f} s</summary>"
    head = f"{_MARK}thought {message.reasoning_s:.2f} -->\n<details>\n{summary}\n\n"
    return f"{head}{_escaped(message.reasoning)}\n\n</details>\n{_MARK}answer -->\n\n"


def _called(message: Message) -> str:
    parts = []
    for step in message.steps:
        for call in step.calls:
            summary = f"<summary>{_plain(call.name)}({_plain(call.arguments)[:200]})</summary>"
            parts.append(f"<details>\n{summary}\n\n{_escaped(call.result)}\n\n</details>\n")
    return "".join(parts)


def _shown(message: Message) -> str:
    """That a message had pictures and documents, which are not in this one, or an answer calls and sources."""
    count = len(message.pictures)
    named = [] if not count else ["A picture"] if count == 1 else [f"{count} pictures"]
    named += [_plain(one.name) for one in message.attachments]
    shown = f"{', '.join(named)}, not in this file: an export as JSON has them." if named else ""
    if shown_sources(message):
        shown = "Sources: " + "; ".join(
            f"[{one.number}] {_plain(one.name)}{f', page {one.page}' if one.page else ''}"
            for one in shown_sources(message)
        )
    shown = _called(message) + (f"*{shown}*\n" if shown else "")
    return f"{_MARK}pictures -->\n{shown}{_MARK}text -->\n\n" if shown else ""


def _plain(name: str) -> str:
    return " ".join(re.sub(r"([*_<>`\[\]\\])", r"\\\1", name).split())


def _escaped(text: str) -> str:
    return re.sub(rf"^(\\*{re.escape(_MARK)})", r"\\\1", text, flags=re.MULTILINE)


def _unescaped(text: str) -> str:
    return re.sub(rf"^\\(\\*{re.escape(_MARK)})", r"\1", text, flags=re.MULTILINE)


def from_markdown(text: str) -> Whole:
    """The conversation in a document; it has a single path.

    Raises:
        NotAChatFileError: no turns were found.
    """
    text = clean_text(text).removeprefix("\ufeff")
    title, turns = _own(text) or _foreign(text)
    if not turns:
        raise NotAChatFileError('it has no turns, such as "## You" and "## Assistant"')
    now = time.time()
    # Ids are made from the text: a document that is imported again is recognised.
    id_ = made_id("markdown", text)
    conversation = Conversation(
        id=id_,
        title="" if title == "Chat" else title,
        created_at=now,
        updated_at=now,
        system_prompt="\n\n".join(turn.content for turn in turns if turn.role == "system"),
    )
    messages: list[Message] = []
    for turn in turns:
        if turn.role != "system":
            parent = messages[-1].id if messages else None
            message = Message(
                made_id(id_, str(len(messages))),
                id_,
                parent,
                turn.role,
                turn.content,
                MessageState.COMPLETE,
                created_at=now,
                reasoning=turn.reasoning,
                reasoning_s=turn.reasoning_s,
                model=turn.model,
            )
            messages.append(message)
    return conversation, messages


def _own(text: str) -> tuple[str, list[_Read]] | None:
    # An editor may have changed the line endings of the markers; those inside a message belong to the message.
    if not _TURN.search(text) and "\r\n" in text:
        text = text.replace("\r\n", "\n")
    marks = list(_TURN.finditer(text))
    if not marks:
        return None
    turns: list[_Read] = []
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    for mark, end in zip(marks, ends, strict=True):
        content = text[mark.end() : end].removesuffix("\n").removesuffix("\n")
        content = content[shown.end() :] if (shown := _SHOWN.match(content)) else content
        thought = _THOUGHT.match(content)
        reasoning, seconds = (_unescaped(thought[2]), float(thought[1])) if thought else ("", 0.0)
        content = _unescaped(content[thought.end() :] if thought else content)
        role = _role(mark[1])
        turns.append(_Read(role, content, reasoning, seconds, mark[2] or "" if role == "assistant" else ""))
    return _title(text[: marks[0].start()]), turns


def _foreign(text: str) -> tuple[str, list[_Read]]:
    marks = list(_FOREIGN.finditer(text))
    if not marks:
        return "", []
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    turns = [
        _Read(_FOREIGN_ROLES.get(mark[1].lower(), "user"), text[mark.end() : end].strip())
        for mark, end in zip(marks, ends, strict=True)
    ]
    return _title(text[: marks[0].start()]), turns


def _role(name: str) -> Role:
    return next(role for role in _HEADINGS if role == name)


def _title(head: str) -> str:
    found = re.search(r"^#[ \t]+(.+?)[ \t]*$", head, re.MULTILINE)
    return found[1] if found else ""
