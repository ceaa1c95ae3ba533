"""The window's texts in the user's language, where a translation exists."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QCoreApplication, QLibraryInfo, QLocale, QTranslator

from engine.common.paths import resources_dir


def translations_dir() -> Path:
    """The folder of `switchyard_<language>.qm` files; its README says how to make one."""
    return resources_dir() / "translations"


def install_translations(app: QCoreApplication, locale: QLocale, folder: Path) -> list[QTranslator]:
    """Installs our translations from `folder` and Qt's own for `locale`, if any; returns them."""
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
