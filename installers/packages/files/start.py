"""What the launcher of an installed program runs: the window, with the files that were opened with it, or a command."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def start(arguments: list[str]) -> int:
    """Runs the window here, and all else in a process of its own, because it needs other folders of libraries."""
    from engine.common import installed

    if any(word.startswith("-") or not os.path.exists(word) for word in arguments):
        return run(*installed.command_line(), arguments)
    folder = installed.window_folder()
    if folder != ROOT / "window":  # an update
        packed = installed.bundle()
        assert packed is not None
        return run(*installed.packed_module(packed, folder, "app.main"), arguments)
    from app.main import main

    return main([sys.argv[0], *arguments])


def run(command: list[str], variables: dict[str, str], arguments: list[str]) -> int:
    environment = {**os.environ, **variables}
    if os.name == "posix":
        os.execve(command[0], [*command, *arguments], environment)
    return subprocess.call([*command, *arguments], env=environment)


def tell(sentence: str) -> None:
    """Where there is no console, in a dialog."""
    if sys.stderr is not None:
        sys.stderr.write(f"{sentence}\n")
    elif sys.platform == "win32":
        import ctypes

        ctypes.windll.user32.MessageBoxW(None, sentence, "Switchyard", 0x10)


if __name__ == "__main__":
    os.environ["SWITCHYARD_BUNDLE"] = str(ROOT)
    sys.path.insert(0, str(ROOT / "window"))
    try:
        code = start(sys.argv[1:])
    except Exception as problem:
        from engine.common.errors import EngineError

        if not isinstance(problem, EngineError):
            raise
        tell(str(problem))
        code = 2
    sys.exit(code)
