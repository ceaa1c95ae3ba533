"""Whether a new window would open: all that it imports is there, and Qt draws.

    python -m app.self_test

Prints one JSON object; `problem` is empty if all is well.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> int:
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    problem, version = "", ""
    try:
        from PySide6.QtWidgets import QApplication, QLabel

        import app.main
        from engine.common.paths import resources_dir

        application = QApplication([])
        label = QLabel(str(len(app.main.page_entries())))
        label.grab()
        del label, application
        if not resources_dir().is_dir():
            problem = "its resources are missing"
        version = _version()
    except Exception as error:  # whatever is missing
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    sys.stdout.write(json.dumps({"problem": problem, **({"version": version} if version else {})}) + "\n")
    return 1 if problem else 0


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("switchyard-app")
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
