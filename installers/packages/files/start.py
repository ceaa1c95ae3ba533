"""What the launcher of an installed program runs: the window's libraries first, then Switchyard."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent

if __name__ == "__main__":
    os.environ["SWITCHYARD_BUNDLE"] = str(ROOT)
    sys.path.insert(0, str(ROOT / "window"))
    from engine.cli import main

    sys.exit(main())
