"""What the launcher of an installed program runs: the window, with the files that were opened with it, or a command."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def start(arguments: list[str]) -> int:
    """Where an update or the engine's part has other libraries, this goes on in a process of its own."""
    try:
        from engine.common.errors import EngineError
        from engine.common.installed import before_start
        from engine.common.plain_text import tell
    except ImportError:
        return damaged()
    try:
        before_start(arguments)
    except EngineError as problem:
        tell(str(problem))
        return 2
    from engine.cli import main

    return main(arguments)


def damaged() -> int:
    """Says that files are missing, with nothing but Python itself."""
    sentence = f"Files of Switchyard are missing in {ROOT}: install it again; models and chats stay."
    if sys.stderr is not None:
        sys.stderr.write(f"{sentence}\n")
    elif sys.platform == "win32":
        import ctypes

        ctypes.windll.user32.MessageBoxW(None, sentence, "Switchyard", 0x10)
    return 2


if __name__ == "__main__":
    os.environ["SWITCHYARD_BUNDLE"] = str(ROOT)
    sys.path.insert(0, str(ROOT / "window"))
    sys.exit(start(sys.argv[1:]))
