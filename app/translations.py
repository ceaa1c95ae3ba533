"""The window's texts in the user's language, where somebody has translated them."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QCoreApplication, QLibraryInfo, QLocale, QTranslator

from engine.common.paths import resources_dir


def translations_dir() -> Path:
    """Where `switchyard_<language>.qm` files lie; the README there says how to make one."""
    return resources_dir() / "translations"


def install_translations(app: QCoreApplication, locale: QLocale, folder: Path) -> list[QTranslator]:
    """Ours from `folder` and Qt's own, as far as there are any for `locale`; those that were installed."""
    installed = []
    for name, place in (
        ("switchyard", str(folder)),
        ("qtbase", QLibraryInfo.path(QLibraryInfo.LibraryPath.TranslationsPath)),
    ):
        translator = QTranslator(app)
        if translator.load(locale, name, "_", place) and app.installTranslator(translator):
            installed.append(translator)
        else:
            translator.deleteLater()
    return installed
