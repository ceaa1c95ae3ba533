"""The window's language: which there are, and what is installed of the one in use.

A translation is a Qt Linguist file, `resources/translations/switchyard_<language>.ts`. Packages have it compiled beside
it, as `.qm`; from a checkout it is compiled into the cache when it is first used or has changed, by the `lrelease` that
comes with PySide6.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import PySide6
from PySide6.QtCore import QCoreApplication, QLibraryInfo, QLocale, QObject, QTranslator, Signal

from engine.common.paths import cache_dir, resources_dir
from engine.common.settings import ENGLISH, LANGUAGES, SYSTEM

_log = logging.getLogger("switchyard.window")
translate = QCoreApplication.translate

_COMPILING_S = 60.0


def translations_dir() -> Path:
    return resources_dir() / "translations"


def language_for(locale: QLocale) -> str | None:
    """The first of the languages that people prefer, there, which we have; None if there is none."""
    scripts: dict[QLocale.Language, QLocale.Script] = {}
    for name in locale.uiLanguages():
        wanted = QLocale(name)
        if wanted.language() == QLocale.Language.C:
            return ENGLISH
        # After `zh-Hant-TW` comes `zh`, which alone would be in the other script.
        script = scripts.setdefault(wanted.language(), wanted.script())
        for ours in LANGUAGES:
            mine = QLocale(ours)
            if (mine.language(), mine.script()) == (wanted.language(), script):
                return ours
    return None


def locale_for(language: str, system: QLocale) -> QLocale:
    """How numbers and dates are written in a language, where the system's territory is."""
    wanted = QLocale(language)
    if system.language() == QLocale.Language.C or language_for(system) == language:
        return system if language_for(system) == language else wanted
    here = QLocale(wanted.language(), wanted.script(), system.territory())
    return here if (here.language(), here.script()) == (wanted.language(), wanted.script()) else wanted


def _compiler() -> Path | None:
    """Qt's lrelease, which comes with PySide6: on some systems in a folder of its own."""
    home, name = Path(PySide6.__file__).parent, "lrelease.exe" if sys.platform == "win32" else "lrelease"
    return next((place for place in (home / name, home / "Qt" / "libexec" / name) if place.is_file()), None)


def compile_translation(source: Path, target: Path) -> bool:
    """Compiles a `.ts` file; whether that was possible.  `target` is whole or not there."""
    compiler = _compiler()
    if compiler is None:
        _log.warning("there is no lrelease to compile %s with", source.name)
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        command = [str(compiler), "-silent", str(source), "-qm", str(unfinished)]
        flags = getattr(subprocess, "CREATE_NO_WINDOW", 0)  # Windows
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILING_S, creationflags=flags)
        unfinished.replace(target)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("%s was not compiled (%s)", source.name, type(error).__name__)
        unfinished.unlink(missing_ok=True)
        return False
    return True


def _compiled(language: str, folder: Path) -> Path | None:
    source, ready = folder / f"switchyard_{language}.ts", folder / f"switchyard_{language}.qm"
    if ready.is_file() or not source.is_file():
        return ready if ready.is_file() else None
    now = source.stat()
    target = cache_dir() / "translations" / f"{source.stem}-{now.st_mtime_ns:x}-{now.st_size:x}.qm"
    if target.is_file():
        return target
    for older in target.parent.glob(f"{source.stem}-*.qm"):
        older.unlink(missing_ok=True)
    return target if compile_translation(source, target) else None


class Languages(QObject):
    """Chooses the language: what people have set, else the system's, else English.

    Signals: `changed`: texts that are made from now on are in another language; those that are shown are not yet.
    """

    changed = Signal()

    def __init__(
        self,
        app: QCoreApplication,
        choice: str = SYSTEM,
        *,
        system: QLocale | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(app)
        self._app = app
        self._system = system or QLocale.system()
        self._folder = folder or translations_dir()
        self._installed: list[QTranslator] = []
        self.language = self._wanted(choice)
        self._install()

    @property
    def missing(self) -> str:
        return self._system.nativeLanguageName() if language_for(self._system) is None else ""

    def set_choice(self, choice: str) -> None:
        wanted = self._wanted(choice)
        if wanted != self.language:
            self.language = wanted
            self._install()
            self.changed.emit()

    def uninstall(self) -> None:
        for translator in self._installed:
            self._app.removeTranslator(translator)
            translator.deleteLater()
        self._installed = []
        QLocale.setDefault(self._system)

    def _wanted(self, choice: str) -> str:
        return choice if choice in LANGUAGES else language_for(self._system) or ENGLISH

    def _install(self) -> None:
        self.uninstall()
        unknown = self.language == ENGLISH and self.missing
        QLocale.setDefault(self._system if unknown else locale_for(self.language, self._system))
        ours = _compiled(self.language, self._folder)
        of_qt = Path(QLibraryInfo.path(QLibraryInfo.LibraryPath.TranslationsPath)) / f"qtbase_{self.language}.qm"
        for file in filter(None, (of_qt, ours)):  # ours is asked first: it was installed last
            translator = QTranslator(self)
            if translator.load(str(file)) and self._app.installTranslator(translator):
                self._installed.append(translator)
            else:
                translator.deleteLater()


def missing_words(language: str) -> str:
    text = translate("Languages", "Switchyard does not speak {0} yet, so it is in English. Settings has its languages.")
    return text.format(language)
