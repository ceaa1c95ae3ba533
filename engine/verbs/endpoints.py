"""`switchyard endpoints`: servers elsewhere that may answer chats and jobs: list, add, test, remove."""

from __future__ import annotations

import argparse
import getpass
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import quoted
from engine.verbs.options import positive_int
from engine.verbs.output import emit, note

if TYPE_CHECKING:
    from engine.remote.capabilities import About
    from engine.remote.endpoint import Endpoint

_KEYS = (
    "A key is never an argument, which other users of this machine could read: --key-stdin reads it from the standard "
    "input and keeps it in the system's keyring; the environment's SWITCHYARD_KEY_NAME (the endpoint's name in capital "
    "letters, with _ for anything but letters and digits) serves for one run."
)


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "endpoints",
        help="servers elsewhere: list, add, test, remove",
        description="Servers elsewhere with OpenAI's interface: vLLM, SGLang, llama.cpp, Ollama, another Switchyard.  "
        "Text goes there only where one is named, as in `switchyard chat --model endpoint:NAME/MODEL`.",
        epilog=_KEYS,
    )
    parser.add_argument("--json", action="store_true", default=False, help="print one JSON document")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for name, text in (
        ("list", "those that were added (the default)"),
        ("add", "test a server, and keep it under a name"),
        ("test", "see which server it is, its models, and what it cannot do"),
        ("look", "ask the local network for Switchyards that were told to announce themselves"),
        ("remove", "forget an endpoint and its key"),
    ):
        action = actions.add_parser(name, help=text, description=text, epilog=_KEYS)
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document")
        if name == "test":
            action.add_argument("endpoint", metavar="NAME|ADDRESS", help="such as http://10.0.0.5:8000/v1#model-id")
        elif name not in ("list", "look"):
            action.add_argument("name", metavar="NAME", help="what to call it")
        if name == "add":
            _add_options(action)


def _add_options(action: argparse.ArgumentParser) -> None:
    action.add_argument("address", metavar="ADDRESS", help="such as http://10.0.0.5:8000/v1")
    action.add_argument("--model", default="", metavar="ID", help="the model to ask; needed if it has several")
    action.add_argument("--key-stdin", action="store_true", help="read its key from the standard input and keep it")
    action.add_argument("--certificate", default="", metavar="FILE", help="trust this certificate (PEM) for it too")
    action.add_argument(
        "--fingerprint", default="", metavar="SHA256", help="trust the server's own certificate if it has this one"
    )
    action.add_argument("--at-once", type=positive_int, metavar="N", help="requests at the same time, at most")
    action.add_argument("--requests-per-minute", type=positive_int, metavar="N", help="what it allows")
    action.add_argument("--tokens-per-minute", type=positive_int, metavar="N", help="what it allows")
    action.add_argument("--price-in", type=float, metavar="X", help="of a million tokens that it reads")
    action.add_argument("--price-out", type=float, metavar="X", help="of a million tokens that it writes")
    action.add_argument("--currency", default="", metavar="C", help="of these prices")
    action.add_argument("--untested", action="store_true", help="keep it without asking it anything")
    action.add_argument("--replace", action="store_true", help="in the place of the endpoint of this name")


def run(args: argparse.Namespace) -> int:
    """Performs the action; returns the exit code."""
    from engine.remote.endpoint import forget_key, parse_endpoint, remove_endpoint, saved_endpoints

    if args.action in (None, "list"):
        saved = saved_endpoints()
        human = "\n".join(map(_line, saved)) or "There are no endpoints yet: see `switchyard endpoints add --help`."
        emit([_document(each) for each in saved], as_json=args.json, human=human)
    elif args.action == "add":
        _add(args)
    elif args.action == "look":
        from engine.remote.nearby import look_around

        found = look_around()
        human = "\n".join(f"{each.name}: {each.url}" for each in found) or "Nobody answered."
        emit([{"name": each.name, "url": each.url} for each in found], as_json=args.json, human=human)
    elif args.action == "test":
        endpoint = parse_endpoint(args.endpoint)
        seen = _look(endpoint)
        emit(_seen(endpoint, seen), as_json=args.json, human=lambda: _words(endpoint, seen))
    else:
        endpoint = parse_endpoint(args.name)
        remove_endpoint(endpoint.name)
        forget_key(endpoint)
        emit({"removed": endpoint.name}, as_json=args.json, human=f"{endpoint.name} is forgotten, with its key.")
    return 0


def _add(args: argparse.Namespace) -> None:
    from engine.remote.endpoint import (
        check_key,
        endpoint_at,
        plain_name,
        save_endpoint,
        save_key,
        saved_endpoints,
        variable_of,
    )

    endpoint = endpoint_at(
        args.address,
        args.name,
        ca_file=args.certificate,
        at_once=args.at_once,
        requests_per_minute=args.requests_per_minute,
        tokens_per_minute=args.tokens_per_minute,
        price_in=args.price_in,
        price_out=args.price_out,
        currency=args.currency,
        **({"model": args.model} if args.model else {}),
    )
    is_taken = any(plain_name(each.name) == plain_name(endpoint.name) for each in saved_endpoints())
    if is_taken and not args.replace:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"There is an endpoint called {quoted(endpoint.name)} already: choose another name, or add --replace.",
        )
    key = check_key(endpoint, _read_key()) if args.key_stdin else None
    if args.fingerprint:
        endpoint = _trusted(endpoint, args.fingerprint)
    seen = None
    if not args.untested:
        seen = _look(endpoint, key)
        endpoint = replace(endpoint, found=seen.found)
    if key and not save_key(endpoint, key):
        variable = variable_of(endpoint)
        note(
            f"switchyard: there is no keyring here, so the key was not kept: put it into the environment as {variable}"
        )
    save_endpoint(endpoint)
    document = _document(endpoint) if seen is None else _seen(endpoint, seen)
    emit(document, as_json=args.json, human=lambda: _line(endpoint) if seen is None else _words(endpoint, seen))


def _trusted(endpoint: Endpoint, wanted: str) -> Endpoint:
    """The endpoint, which its own certificate is trusted for from now on, if it is the one of this fingerprint."""
    from engine.remote.trust import fingerprint, keep_certificate, offered_certificate

    pem = offered_certificate(endpoint)
    shown = fingerprint(pem)
    if shown.replace(":", "") != wanted.replace(":", "").strip().upper():
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{endpoint.host} shows a certificate with the fingerprint {shown}, which is another: do not trust it "
            "before you know why.",
        )
    return replace(endpoint, ca_file=str(keep_certificate(endpoint, pem)))


def _read_key() -> str:
    if sys.stdin is not None and sys.stdin.isatty():
        key = getpass.getpass("Key: ")
    else:
        key = sys.stdin.readline(8192) if sys.stdin is not None else ""
    if not key.strip():
        raise EngineError(ErrorCode.INVALID_REQUEST, "There is no key on the standard input: pipe it in.")
    return key


def _look(endpoint: Endpoint, key: str | None = None) -> About:
    from engine.remote.capabilities import about
    from engine.remote.client import Client

    with Client(endpoint, key) as client:
        return about(client)


def _line(endpoint: Endpoint) -> str:
    from engine.remote.capabilities import SERVERS

    found = endpoint.found
    server = f"{SERVERS[found.server]} {found.version}".strip() if found.server else "not tested"
    models = f", {len(found.models):,} models" if len(found.models) != 1 else f", {found.models[0]}"
    return f"{endpoint.name}: {endpoint.url} ({server}{models if found.server else ''})"


def _document(endpoint: Endpoint) -> dict[str, Any]:
    found = endpoint.found
    return {
        "name": endpoint.name,
        "url": endpoint.url,
        "model": endpoint.model,
        "at_once": endpoint.at_once,
        "requests_per_minute": endpoint.requests_per_minute,
        "tokens_per_minute": endpoint.tokens_per_minute,
        "price_in": endpoint.price_in,
        "price_out": endpoint.price_out,
        "currency": endpoint.currency,
        "certificate": endpoint.ca_file,
        "server": found.server,
        "version": found.version,
        "models": list(found.models),
        "lacks": list(found.lacks),
        "blind": list(found.blind),
    }


def _seen(endpoint: Endpoint, seen: About) -> dict[str, Any]:
    return {
        **_document(replace(endpoint, found=seen.found)),
        "tried": seen.model,
        "latency_s": seen.latency_s,
        "first_token_s": seen.first_token_s,
        "problem": seen.problem,
    }


def _words(endpoint: Endpoint, seen: About) -> str:
    from engine.remote.capabilities import LACKS, SERVERS
    from engine.remote.endpoint import remote_name

    found = seen.found
    lines = [
        f"{endpoint.name}: {SERVERS[found.server]} {found.version}".rstrip(),
        f"  address     {endpoint.url}",
        f"  models      {', '.join(found.models[:8]) or 'none'}{', …' if len(found.models) > 8 else ''}",
        f"  answers in  {1000 * seen.latency_s:.0f} ms"
        + (f", the first token after {seen.first_token_s:.2f} s" if seen.first_token_s is not None else ""),
    ]
    if seen.problem:
        lines.append(f"  problem     {seen.problem}")
    elif not seen.model:
        lines.append("  not tried   it has several models: name one with --model or #MODEL-ID")
    lines += [f"  cannot      {LACKS[lack]}" for lack in found.lacks]
    if seen.model in found.blind:
        lines.append("  cannot      this model reads no pictures")
    lines.append(f"  to chat     switchyard chat --model {remote_name(endpoint, seen.model or 'MODEL')!r}")
    return "\n".join(lines)
