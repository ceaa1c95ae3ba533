"""Runs before the program's folder goes: removes what lies elsewhere, and asks about what is the user's."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent

if __name__ == "__main__":
    os.environ["SWITCHYARD_BUNDLE"] = str(ROOT)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(ROOT / "window"))
    from engine.parts.remove import main

    sys.exit(main(sys.argv[1:]))
