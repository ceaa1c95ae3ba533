"""`switchyard serve`: other programs use the model, over OpenAI's, Anthropic's and Ollama's interfaces."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.common.errors import EngineError, ErrorCode
from engine.common.kept_context import OTHER_PROGRAMS, keeping_requests
from engine.common.settings import DEFAULT_SERVER_PORT
from engine.verbs.options import add_engine_options, engine_config, positive_int
from engine.verbs.output import emit, note

if TYPE_CHECKING:
    from engine.remote.nearby import Announcer
    from engine.serving.server import Address

_KEY_VARIABLE = "SWITCHYARD_KEY"
_ENGINE_ENDED = "switchyard: The engine stopped unexpectedly. The next request starts it again."


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve",
        help="let other programs use the model",
        description="Answers programs that speak OpenAI's, Anthropic's or Ollama's interface, many at once, until it "
        "is stopped with Ctrl-C. Only this machine can reach it unless --host says otherwise, which needs a key. "
        "Nothing that is asked or answered is logged, and nothing of it is stored unless --keep-context asks for it.",
    )
    options: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("--model", "M", {"default": "starter", "help": "for requests that name no model of the library"}),
        ("--alias", "N", {"action": "append", "default": [], "help": "another name of that model; may be repeated"}),
        ("--host", "H", {"default": "127.0.0.1", "help": "address to listen on (default 127.0.0.1)"}),
        (
            "--port",
            "P",
            {"type": _port, "default": DEFAULT_SERVER_PORT, "help": f"default {DEFAULT_SERVER_PORT}; 0: any"},
        ),
        ("--key-file", "FILE", {"type": Path, "help": f"holds the key that clients send (or set {_KEY_VARIABLE})"}),
        ("--name", "N", {"action": "append", "default": [], "help": "another name of this machine; may be repeated"}),
        ("--origin", "URL", {"action": "append", "default": [], "help": "a web page that may ask; may be repeated"}),
        ("--unload-after", "MINUTES", {"type": positive_int, "help": "free an unused model (default: never)"}),
    )
    for name, metavar, how in options:
        parser.add_argument(name, metavar=metavar, **how)
    parser.add_argument(
        "--https", action="store_true", help="encrypt, with a certificate of this machine's own, made once"
    )
    parser.add_argument(
        "--keep-context",
        action="store_true",
        help="keep what the model computes of prompts and answers on disk, encrypted, so that they go on at once after "
        "a restart (default: in RAM only; `switchyard kept` says how much, and removes it)",
    )
    parser.add_argument(
        "--announce",
        metavar="NAME",
        help="let other Switchyards on the local network find it under this name (needs a --host other than 127.0.0.1)",
    )
    parser.add_argument("--json", action="store_true", help="print the address as one JSON document")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serves until it is interrupted; returns the exit code."""
    from engine.checkpoint.library import resolve

    path = resolve(args.model)  # before importing torch: report a mistyped name immediately
    address = _address(args)
    address.check()
    if args.announce is not None and address.is_local:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            "Only this machine can reach the server: --announce needs a --host such as 0.0.0.0 as well.",
        )
    from engine.protocol import Ask
    from engine.remote.trust import fingerprint
    from engine.serving.engine_process import EngineProcess
    from engine.serving.server import Server
    from engine.serving.service import LibraryModels, Service

    idle_s = args.unload_after * 60.0 if args.unload_after else None
    chat = OTHER_PROGRAMS if args.keep_context else ""
    engine = EngineProcess(engine_config(args, str(path)), idle_s, lambda: note(_ENGINE_ENDED), chat)
    engine.on_remark = lambda text: note(f"switchyard: {text}")
    # A path is no name for clients.
    models = LibraryModels(path, path.name if os.path.lexists(args.model) else args.model, args.alias)
    server = Server(Service(engine, models), address)
    try:
        port = server.start()
    except EngineError:
        engine.close()
        raise
    with keeping_requests(wanted=args.keep_context):
        engine.start()
        announcer = None
        try:
            engine.ask(Ask(path, text="", wants="length"), lambda _event: None)  # loads it before anybody asks
            announcer = _announced(args.announce, port, is_https=args.https)
            host = reached_at(address.host)
            host = f"[{host}]" if ":" in host else host
            url = f"{'https' if args.https else 'http'}://{host}:{port}"
            shown = fingerprint(address.certificate.read_bytes()) if address.certificate is not None else ""
            human = (
                f"Serving {args.model} at {url}\n"
                f"  OpenAI:    {url}/v1    Anthropic: {url}    Ollama: {url}\n"
                f"  Key:       {'needed' if address.key else 'none needed (any will do)'}\n"
                + (f"  Certificate, SHA-256: {shown}\n" if shown else "")
                + "Ctrl-C stops it."
            )
            document = {
                "url": url,
                "port": port,
                "model": args.model,
                "needs_key": bool(address.key),
                "fingerprint": shown,
            }
            emit(document, as_json=args.json, human=human)
            _until_stopped()
        finally:
            if announcer is not None:
                announcer.stop()
            engine.expect_end()  # it may end with the server's thread, which has started it
            server.stop()
            engine.close()
    return 0


def reached_at(host: str) -> str:
    """What others call this machine that is reached at all of its addresses; no packet is sent to find it."""
    family, elsewhere = {"0.0.0.0": (socket.AF_INET, "192.0.2.1"), "::": (socket.AF_INET6, "2001:db8::1")}.get(
        host, (None, "")
    )
    if family is None:
        return host
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((elsewhere, 9))
            return str(asked.getsockname()[0])
    except OSError:  # without a network
        return host


def _announced(name: str | None, port: int, *, is_https: bool) -> Announcer | None:
    """What answers who looks around the network, if that is wanted."""
    from engine.remote.nearby import Announcer

    if name is None:
        return None
    try:
        announcer = Announcer(name, port, is_https=is_https)
    except OSError as error:
        note(f"switchyard: the server cannot be announced ({error.strerror or error}); it works all the same")
        return None
    announcer.start()
    return announcer


def _address(args: argparse.Namespace) -> Address:
    from engine.serving.server import Address, own_certificate

    key = os.environ.get(_KEY_VARIABLE, "")
    if args.key_file is not None:
        try:
            key = args.key_file.read_text("utf-8")[:4096].strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"The key file {args.key_file} cannot be read: {reason}."
            ) from None
    certificate = own_certificate() if args.https else None
    address = Address(args.host, args.port, key, tuple(args.name), tuple(args.origin), certificate)
    return replace(address, host="127.0.0.1") if args.host == "localhost" else address


def _until_stopped() -> None:
    """Returns at Ctrl-C or when the process is asked to end."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: stopped.set())
    while not stopped.wait(0.5):  # a wait without a limit would not notice signals on Windows
        pass


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use a number from 0 to 65535")
    return int(text)
