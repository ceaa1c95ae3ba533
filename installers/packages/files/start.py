"""What the launcher of an installed program runs: the window, with the files that were opened with it, or a command."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def start(arguments: list[str]) -> int:
    os.environ["SWITCHYARD_BUNDLE"] = str(ROOT)
    sys.path.insert(0, str(ROOT / "window"))
    from engine.common.installed import before_start

    before_start()
    if all(not word.startswith("-") and os.path.exists(word) for word in arguments):
        from app.main import main as window

        return window([sys.argv[0], *arguments])
    from engine.cli import main as command

    return command(arguments)


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
