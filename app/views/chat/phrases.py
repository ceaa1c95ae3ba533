"""Statistics and states of an answer in words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from PySide6.QtCore import QCoreApplication

from app.engine_words import said
from app.models.library import ModelRow
from app.services.answer_queue import CANCELLED, Phase, Stage
from app.services.chat_store import Attachment, Message, MessageState, Source
from app.services.chat_store.records import EDITED, MATCH_END, MATCH_START, AnswerStats
from app.widgets.quantities import SEPARATOR, count, duration, file_size, number, percent
from engine.common.errors import ErrorCode
from engine.common.model_info import ModelInfo
from engine.common.settings import STARTER
from engine.common.untrusted import reason
from engine.hardware.gpu_info import CARD_NAMES
from engine.remote.endpoint import Endpoint, RemoteModel, called

translate = QCoreApplication.translate


def phase_text(phase: Phase) -> str:
    part = "" if phase.fraction is None else f" {percent(phase.fraction)}"
    if phase.stage is Stage.NO_ENGINE:
        return translate("Chat", "waiting for the engine, which is not running")
    if phase.stage is Stage.NO_MODEL:
        return translate("Chat", "waiting for a model: none is loaded")
    if phase.stage is Stage.LOADING:
        return translate("Chat", "waiting for the model to load") + part
    if phase.stage is Stage.LOOKING_UP:
        return translate("Chat", "searching the documents")
    if phase.stage is Stage.STARTING_TOOLS:
        return translate("Chat", "starting the servers with the tools")
    if phase.stage is Stage.ALLOWING:
        return translate("Chat", "waiting for you to allow a call")
    if phase.stage is Stage.CALLING:
        return translate("Chat", "waiting for a tool")
    if phase.stage is Stage.QUEUED:
        return translate("Chat", "waiting for another answer")
    if phase.stage is Stage.ASKING:
        return translate("Chat", "waiting for the first token from the other server")
    if phase.stage is Stage.READING:
        return translate("Chat", "reading the prompt") + part
    doing = translate("Chat", "thinking") if phase.stage is Stage.THINKING else translate("Chat", "writing")
    return SEPARATOR.join((doing, rate(phase.tokens_per_s))) if phase.tokens_per_s > 0 else doing


def rate(tokens_per_s: float) -> str:
    return translate("Chat", "{0} tokens/s").format(number(tokens_per_s, 1))


def stats_text(message: Message) -> str:
    parts = [message.model] if message.content and _is_elsewhere(message) else []
    stats = message.stats
    if stats is not None:
        if stats.tokens_per_s > 0:
            parts.append(rate(stats.tokens_per_s))
        if stats.ttft_s > 0:
            parts.append(
                translate("Chat", "first token {0} s").format(number(stats.ttft_s, 1 if stats.ttft_s >= 0.95 else 2))
            )
        if stats.generated_tokens:
            tokens = stats.generated_tokens
            parts.append(
                translate("Chat", "1 token")
                if tokens == 1
                else translate("Chat", "{0} tokens", "", tokens).format(count(tokens))
            )
        if stats.accepted_tokens:
            drafted = translate("Chat", "{0} of {1} drafted tokens accepted")
            parts.append(drafted.format(count(stats.accepted_tokens), count(stats.guessed_tokens)))
        if stats.pictures:
            parts.append(_pictures_text(stats))
        if stats.finish_reason == "length":
            parts.append(translate("Chat", "reached the limit"))
        elif stats.finish_reason == "context":
            parts.append(translate("Chat", "the context is full"))
        parts += [said(stats.gave_way)] if stats.gave_way else []
    if message.reason_code == EDITED:
        parts.append(translate("Chat", "edited"))
    if message.reason_code == CANCELLED:
        parts.append(translate("Chat", "stopped"))
    return SEPARATOR.join(parts)


def _pictures_text(stats: AnswerStats) -> str:
    seconds = number(stats.pictures_s, 1 if stats.pictures_s >= 0.95 else 2)
    if stats.pictures == 1:
        if stats.pictures_kept:
            return translate("Chat", "picture read before")
        return translate("Chat", "picture read in {0} s").format(seconds)
    if not stats.pictures_kept:
        return translate("Chat", "{0} pictures read in {1} s").format(count(stats.pictures), seconds)
    if stats.pictures_kept == stats.pictures:
        return translate("Chat", "{0} pictures read before").format(count(stats.pictures))
    words = translate("Chat", "{0} of {1} pictures read before, the others in {2} s")
    return words.format(count(stats.pictures_kept), count(stats.pictures), seconds)


def _is_elsewhere(message: Message) -> bool:
    return message.model.endswith(")") and "(" in message.model


def thought_text(seconds: float, *, thinking: bool) -> str:
    if thinking:
        return translate("Chat", "Thinking… {0}").format(duration(seconds))
    if seconds <= 0:
        return translate("Chat", "Thought")
    return translate("Chat", "Thought for {0}").format(duration(seconds))


def trouble_text(message: Message) -> str:
    if message.role != "assistant" or message.reason_code in ("", CANCELLED, EDITED):
        return _only_thought(message) or _ran_out(message)
    text = said(message.reason) or translate("Chat", "The answer is incomplete.")
    if message.state is MessageState.PARTIAL:
        text += " " + translate("Chat", "The text so far is kept.")
    elif message.reason_code == ErrorCode.PROMPT_TOO_LONG.value:
        text += " " + translate("Chat", "Your message is kept: make room, edit it, or start a new chat.")
    return text


def _only_thought(message: Message) -> str:
    reason = message.stats.finish_reason if message.stats is not None else ""
    if message.content or not message.reasoning or reason not in ("length", "context"):
        return ""
    if reason == "context":
        return translate("Chat", "The context was full before the answer began: make room, and ask again.")
    return translate("Chat", "It was still thinking when it reached the limit: raise Max tokens, or let it think less.")


def ran_out(message: Message) -> bool:
    is_cut = message.stats is not None and message.stats.finish_reason == "context"
    return is_cut or message.reason_code == ErrorCode.PROMPT_TOO_LONG.value


def _ran_out(message: Message) -> str:
    if not ran_out(message) or not message.content:
        return ""
    return translate("Chat", "The answer ran into the end of the context: make room, and let it continue.")


def model_text(model: ModelInfo) -> str:
    return f"{model.name} · {model.precision_words}"


def about_text(row: ModelRow) -> str:
    entry = row.entry
    if row.remote:
        context = translate("Chat", "{0} tokens of context").format(count(entry.context_tokens))
        usual = translate("Chat", "for new chats") if row.is_default else ""
        return " · ".join(filter(None, (row.place, context if entry.context_tokens else "", usual)))
    parts = [
        file_size(entry.bytes_on_disk) if entry.bytes_on_disk else "",
        entry.precision_words,
        translate("Chat", "sees pictures") if entry.sees else "",
        entry.origin if entry.is_in_place and entry.origin != "folder" else "",
        translate("Chat", "default") if row.is_default else "",
        translate("Chat", "loaded") if row.is_loaded else "",
    ]
    return " · ".join(filter(None, parts))


def speed_text(row: ModelRow) -> tuple[str, str]:
    if row.entry.measured_tokens_per_s:
        return rate(row.entry.measured_tokens_per_s), translate("Chat", "measured")
    return (rate(row.predicted), translate("Chat", "predicted")) if row.predicted else ("", "")


def title_text(row: ModelRow) -> str:
    if row.remote:
        return row.entry.name or translate("Chat", "The only model there")
    return translate("Chat", "Starter") if row.entry.name == STARTER else row.entry.name


def choice_text(row: ModelRow) -> str:
    said = (title_text(row), about_text(row), " ".join(speed_text(row)).strip(), row.entry.problem)
    return "\n".join(filter(None, said))


def sent_text(endpoint: Endpoint) -> str:
    if endpoint.is_here:
        return translate("Chat", "Sent to {0}, another program on this PC").format(called(endpoint))
    return translate("Chat", "Sent to {0}").format(called(endpoint))


def leaves_text(endpoint: Endpoint) -> str:
    if endpoint.is_here:
        return translate("Chat", "{0}: what you write in this chat stays on this PC.").format(sent_text(endpoint))
    return translate("Chat", "{0}: what you write in this chat leaves this PC.").format(sent_text(endpoint))


def not_taken_text(names: Sequence[str]) -> str:
    words = {
        "top_k": translate("Chat", "top-k"),
        "min_p": translate("Chat", "min-p"),
        "repetition_penalty": translate("Chat", "the repetition penalty"),
        "dry": translate("Chat", "loop guard"),
        "beams": translate("Chat", "beam search"),
        "thinking": translate("Chat", "how much to think"),
    }
    if not names:
        return ""
    return translate("Chat", "It does not take this chat's {0}.").format(
        ", ".join(words.get(one, one) for one in names)
    )


def text_only_text(remote: RemoteModel | None, here: str, seeing: Sequence[str]) -> str:
    """Why no pictures can be sent, and what could read them.

    Args:
        here: the name of the model on this PC that answers where no other server does; empty if none is loaded.
        seeing: names of the models on this PC that see.
    """
    if remote is not None:
        words = translate("Chat", "{0} of {1} reads text only: choose another model to send pictures.")
        return words.format(remote.model or translate("Chat", "The model"), remote.endpoint.name)
    words = translate("Chat", "{0} reads text only.").format(here or translate("Chat", "The model"))
    return f"{words} {seeing_text(seeing)}"


MOST_NAMED = 3
"""Models in a sentence."""


def seeing_text(seeing: Sequence[str]) -> str:
    if not seeing:
        return translate("Chat", "No model on this PC sees pictures.")
    named = ", ".join(seeing[:MOST_NAMED])
    if len(seeing) > MOST_NAMED:
        named = translate("Chat", "{0} and {1} more").format(named, len(seeing) - MOST_NAMED)
    return translate("Chat", "On this PC these see pictures: {0}.").format(named)


def picture_text(width: int, height: int, tokens: int | None) -> str:
    size = f"{count(width)} × {count(height)}"
    if tokens is None:
        return size
    return f"{size} · {translate('Chat', '{0} tokens', '', tokens).format(count(tokens))}"


def too_long_text(used: int, limit: int, *, is_chat: bool, folds: bool) -> str:
    """That a prompt does not fit, before it is sent.

    Args:
        is_chat: whether the message alone would fit.
        folds: whether there are earlier turns that can make room.
    """
    if not is_chat:
        words = translate("Chat", "Your message has about {0} tokens; the model reads {1}. Shorten it.")
    elif folds:
        words = translate(
            "Chat",
            "With your message this chat has about {0} tokens; the model reads {1}. Make room, or ask in a new chat.",
        )
    else:
        words = translate(
            "Chat", "With your message this chat has about {0} tokens; the model reads {1}. Ask in a new chat."
        )
    return words.format(count(used), count(limit))


def filling_text(used: int, limit: int) -> str:
    words = translate("Chat", "This chat takes {0} of the {1} tokens the model reads. Make room before it is full.")
    return words.format(count(used), count(limit))


def full_text(used: int, limit: int) -> str:
    words = translate("Chat", "The context is full: {0} of {1} tokens are taken. Make room, or ask in a new chat.")
    return words.format(count(used), count(limit))


def folding_text(share: float, *, is_writing: bool) -> str:
    if not is_writing:
        return translate("Chat", "The earlier turns are summarised once the model is idle.")
    words = translate("Chat", "Summarising the earlier turns… {0}. Your messages come first.")
    return words.format(percent(share))


def attachment_text(attachment: Attachment, share: float | None, where: str) -> str:
    """What is known of a document: its pages and tokens, how much has been read, or why it cannot be.

    Args:
        where: the server that it goes to; empty if it stays on this PC.
    """
    if share is not None and (share or not attachment.is_read):
        return translate("Chat", "Reading… {0}").format(percent(share)) if share else translate("Chat", "Reading…")
    if attachment.problem:
        what = translate("Chat", "folder") if attachment.kind == "folder" else translate("Chat", "file")
        return translate("Chat", "This {0} {1}.").format(what, attachment.problem)
    if not attachment.is_read:
        return translate("Chat", "Not read yet")
    parts = []
    if attachment.kind == "folder":
        words = (
            translate("Chat", "1 file")
            if attachment.files == 1
            else translate("Chat", "{0} files", "", attachment.files)
        )
        parts.append(words.format(count(attachment.files)))
    if attachment.pages:
        words = (
            translate("Chat", "1 page")
            if attachment.pages == 1
            else translate("Chat", "{0} pages", "", attachment.pages)
        )
        parts.append(words.format(count(attachment.pages)))
    if attachment.tokens:
        parts.append(translate("Chat", "{0} tokens", "", attachment.tokens).format(count(attachment.tokens)))
    elif attachment.characters:
        parts.append(translate("Chat", "about {0} tokens").format(count(-(-attachment.characters // 4))))
    if where:
        parts.append(translate("Chat", "goes to {0}").format(where))
    return SEPARATOR.join(parts)


def source_place(source: Source) -> str:
    page = translate("Chat", "page {0}").format(source.page) if source.page else ""
    return SEPARATOR.join(filter(None, (page, source.heading)))


def left_out_text(names: Sequence[str]) -> str:
    more = translate("Chat", "{0} and {1} more").format(names[0], len(names) - 1) if len(names) > 1 else names[0]
    words = translate("Chat", "There was no room for {0} beside this chat: ask in a new chat, or shorten this one.")
    return words.format(more)


def not_looked_into_text(error: Exception) -> str:
    words = translate("Chat", "The documents could not be searched ({0}), so the answer is given without them.")
    return words.format(reason(error))


def unseen_text() -> str:
    return translate("Chat", "It reads text only: the pictures in this chat are not sent.")


def unseen_here_text(seeing: Sequence[str]) -> str:
    words = translate("Chat", "This model reads text only: the pictures in this chat are not read.")
    return f"{words} {seeing_text(seeing)}"


def found_words(snippet: str) -> str:
    """The first words of a snippet that were found, those side by side together."""
    marked = re.sub(rf"{MATCH_END}(\s+){MATCH_START}", r"\1", snippet)
    found = re.search(f"{MATCH_START}(.*?){MATCH_END}", marked)
    return found[1] if found else ""


def gone_text(model: str) -> str:
    name = model.partition(":")[2].partition("/")[0]
    return translate(
        "Chat", "The server {0} is no longer in the list, and nothing else answers here: choose a model for this chat."
    ).format(name)


def device_text(model: ModelInfo) -> str:
    threads = (
        translate("Chat", "1 thread")
        if model.threads == 1
        else translate("Chat", "{0} threads", "", model.threads).format(model.threads)
    )
    if model.device == "cpu":
        return f"{translate('Chat', 'CPU')} · {threads}"
    name = translate("Chat", "GPU") if model.device.startswith(CARD_NAMES) else model.device
    return f"{name} + {translate('Chat', 'CPU')} · {threads}" if model.experts else name
