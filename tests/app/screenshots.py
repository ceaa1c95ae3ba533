"""Pictures of every page: `python -m tests.app.screenshots FOLDER --size 900x600 --scale 2 --theme dark --text 20`.

Draws offscreen, so that no display is needed; names of scenes after the folder draw only those.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path


def main(argv: list[str]) -> int:
    """Draws; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.app.screenshots", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures go, a PNG each")
    parser.add_argument("scenes", nargs="*", help="names of scenes, or how they begin; all of them if none is given")
    parser.add_argument("--size", default="1280x800", help="of the window, in device-independent pixels")
    parser.add_argument("--scale", default="1", help="device pixels to one of those")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--language", default="en", help="of the window: de, es, fr, ja, zh_CN")
    parser.add_argument("--text", type=int, default=14, help="size of body text")
    args = parser.parse_intermixed_args(argv)
    width, _, height = args.size.partition("x")
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    os.environ["QT_SCALE_FACTOR"] = args.scale
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        os.environ["SWITCHYARD_HOME"] = home
        _draw(args, int(width), int(height), Path(home))
    return 0


def _draw(args: argparse.Namespace, width: int, height: int, home: Path) -> None:
    from PySide6.QtCore import QPoint, QSize
    from PySide6.QtGui import QPainter
    from PySide6.QtWidgets import QApplication

    from app.languages import Languages
    from app.main import GarbageCollection
    from app.services.settings import Settings
    from app.theme import ThemeController
    from tests.app.stage import SCENES, staged

    app = QApplication([])
    GarbageCollection(app)  # as in the window: each scene leaves its services behind while the next one's threads work
    Languages(app, args.language)
    theme = ThemeController(args.theme, args.text)
    for name, enter in SCENES.items():
        if args.scenes and not any(name.startswith(wanted) for wanted in args.scenes):
            continue
        folder = Path(tempfile.mkdtemp(dir=home))
        os.environ["SWITCHYARD_HOME"] = str(folder)
        settings = Settings()
        with staged(settings, theme, folder) as stage:
            stage.show(QSize(width, height))
            enter(stage)
            stage.breathe(100)
            stage.settle()
            picture = stage.window.grab()
            if stage.dialog is not None:
                over = stage.dialog.grab()
                painter = QPainter(picture)
                x, y = width // 2 - stage.dialog.width() // 2, height // 2 - stage.dialog.height() // 2
                painter.drawPixmap(QPoint(x, y), over)
                painter.end()
            picture.save(str(args.folder / f"{name}.png"))
            sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
