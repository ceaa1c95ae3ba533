"""The `switchyard` command: without a verb it opens the window, with one it does that and exits.

Exit codes: 0 done; 2 a user error, reported in one line; 1 an internal error; 130 stopped with Ctrl-C.
A verb's module is imported when that verb is used, so that `--help` and `models list` never wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from engine.checkpoint.mirror import begin_with_proxy
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import make_private
from engine.common.installed import bundle, engine_module, files_to_open, go_on_as, missing_engine, version
from engine.common.paths import own_dirs, python_module
from engine.common.plain_text import fill_streams
from engine.hardware.surroundings import has_display
from engine.process.failures import as_engine_error, log_failure
from engine.process.lifetime import log_to_file
from engine.verbs.output import note, report_error

VERBS = {
    "chat": "answer once, or converse in the terminal",
    "batch": "rows in, rows out: a file of prompts answered into a file",
    "jobs": "batch jobs: list, show, stop, remove",
    "models": "the model library",
    "engine": "get what answers, for an installed package without its window",
    "kept": "computed context of chats that is kept on disk: show, clear, on, off",
    "endpoints": "servers elsewhere that may answer: list, add, test, remove",
    "serve": "let other programs use the model",
    "bench": "measure this machine, with peers in the same run",
    "cache": "replay recorded routing: hit rates of expert caches, by policy and size",
    "tune": "measure this machine, time real tokens of the best plans, and keep what won",
    "plan": "how a model would run on a machine: memory, placement, speed",
    "simulate": "predicted timeline and speed of a model on a machine; published figures against predictions",
    "doctor": "what was detected, what is missing, how to fix it",
}
"""Each is a module of `engine.verbs` with `add_parser(subparsers)` and, unless that sets it, `run(args) -> int`."""

INTERRUPTED = 130
PIPE_CLOSED = 141


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing usage and exiting, so that every error is reported the same way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        hint = f"`{self.prog} --help` lists the options"
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{message}; {hint}.")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `switchyard`; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    fill_streams()
    _heed_interrupts()
    make_private(own_dirs())
    begin_with_proxy()
    end_log = log_to_file("command.log", also_stderr=False)
    try:
        return _run(arguments)
    except EngineError as error:
        if _was_interrupted(error):
            return INTERRUPTED
        report_error(error, as_json="--json" in arguments)
        return 2 if error.code.is_users else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`| head`): report nothing, and flush nothing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return PIPE_CLOSED
    except SystemExit:
        raise
    except BaseException as error:  # a library written in Rust raises a bare `BaseException`
        if _was_interrupted(error):
            return INTERRUPTED
        failure = missing_engine(error)
        if failure is None:
            doing = "running this command"
            log_failure(error, doing)
            failure = as_engine_error(error, doing)
        report_error(failure, as_json="--json" in arguments)
        return 2 if failure.code.is_users else 1
    finally:
        end_log()


def _heed_interrupts() -> None:
    """Makes Ctrl-C and `kill -INT` also end a command that a script started in the background.

    A shell without job control starts such commands with SIGINT ignored, and Python then installs no handler.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(arguments: list[str]) -> int:
    verb = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = _Parser(
        prog="switchyard",
        description="Mixture-of-Experts models on your own PC.  Without a verb: open the window, with files if named.",
    )
    parser.add_argument("--version", action="version", version=f"switchyard {version()}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB")
    module = None
    for name, summary in VERBS.items():
        if name == verb:
            module = importlib.import_module(f"engine.verbs.{name}")
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    if module is None and (files := files_to_open(arguments)):
        return _open_window(files)
    args = parser.parse_args(arguments)
    if module is None:
        return _open_window([])
    run = getattr(args, "run", None) or module.run
    return int(run(args))


def _was_interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C caused it: an interrupted computation may raise something else while it is torn down."""
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        if isinstance(behind, KeyboardInterrupt):
            return True
        seen.add(id(behind))
        behind = behind.__cause__ or behind.__context__
    return False


def _open_window(files: list[str]) -> int:
    if not has_display():
        note("switchyard: no display (DISPLAY and WAYLAND_DISPLAY are not set); chatting in this terminal.")
        if bundle() is not None:  # whose window knows no PyTorch
            command, variables = engine_module("engine.cli")
            return go_on_as([*command, "chat"], variables)
        return _run(["chat"])
    command, variables = python_module("app")
    return go_on_as([*command, *files], variables)


if __name__ == "__main__":
    sys.exit(main())
