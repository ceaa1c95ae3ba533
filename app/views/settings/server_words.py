"""What a server elsewhere was seen to be, in words."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication

from app.widgets.quantities import SEPARATOR, count, number
from engine.remote.endpoint import Endpoint, Found, Lack, Server

translate = QCoreApplication.translate

SERVERS: dict[Server, str] = {
    "switchyard": "Switchyard",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
    "llama-cpp-python": "llama-cpp-python",
    "ollama": "Ollama",
    "openai": "OpenAI",
}
_MOST_NAMED = 4


def found_text(found: Found) -> str:
    """Which server it is, its models, and what it cannot do."""
    if not found.server:
        return translate("Servers", "Not tested yet.")
    server = SERVERS.get(found.server, translate("Servers", "A server with OpenAI's interface"))
    models = ", ".join(found.models[:_MOST_NAMED]) or translate("Servers", "no model")
    if len(found.models) > _MOST_NAMED:
        models = translate("Servers", "{0} and {1} more").format(models, count(len(found.models) - _MOST_NAMED))
    lines = [SEPARATOR.join((f"{server} {found.version}".strip(), models))]
    if found.lacks:
        *others, last = map(lack_text, found.lacks)
        either = translate("Servers", "{0} or {1}").format(", ".join(others), last) if others else last
        lines.append(translate("Servers", "It cannot {0}.").format(either))
    if found.blind:
        named = ", ".join(found.blind[:_MOST_NAMED])
        if len(found.blind) > _MOST_NAMED:
            named = translate("Servers", "{0} and {1} more").format(named, count(len(found.blind) - _MOST_NAMED))
        words = translate("Servers", "Models that read text only, no pictures: {0}.").format(named)
        lines.append(words if len(found.models) > 1 else translate("Servers", "It reads text only, no pictures."))
    return "\n".join(lines)


def lack_text(lack: Lack) -> str:
    """What a server cannot do, to go on a sentence that says so."""
    return {
        "stream": translate("Servers", "send answers as they are written"),
        "usage": translate("Servers", "count tokens"),
        "tools": translate("Servers", "call tools"),
        "schema": translate("Servers", "keep to a schema"),
        "sampling": translate("Servers", "take top-k, min-p or a repetition penalty"),
    }[lack]


def money_text(endpoint: Endpoint) -> str:
    """Its limits and prices, as far as they are given."""
    currency = f" {endpoint.currency}".rstrip()
    per_minute, at_once = endpoint.requests_per_minute, endpoint.at_once
    parts = [
        translate("Servers", "{0} at once").format(count(at_once)) if at_once else "",
        translate("Servers", "{0} requests a minute").format(count(per_minute)) if per_minute else "",
        translate("Servers", "{0} tokens a minute").format(count(endpoint.tokens_per_minute))
        if endpoint.tokens_per_minute
        else "",
        translate("Servers", "a million tokens read: {0}{1}").format(number(endpoint.price_in, 2), currency)
        if endpoint.price_in is not None
        else "",
        translate("Servers", "written: {0}{1}").format(number(endpoint.price_out, 2), currency)
        if endpoint.price_out is not None
        else "",
    ]
    return SEPARATOR.join(filter(None, parts))
