"""Version, licences, and the log folder."""

from __future__ import annotations

import platform
from pathlib import Path

import PySide6
from PySide6.QtCore import QCoreApplication, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QPlainTextEdit, QWidget

from app.services.diagnosis import Diagnosis
from app.views.settings.card import SettingsCard
from app.widgets.asking import ask_where_to_report
from app.widgets.scaffold import push_button, vbox
from engine.common.files import private_folder
from engine.common.installed import version
from engine.common.paths import log_dir, resources_dir

translate = QCoreApplication.translate

_LICENCES = (
    ("Switchyard", "Apache License 2.0"),
    ("Inter, the typeface", "SIL Open Font License 1.1, Copyright 2016-2022 The Inter Project Authors"),
    ("Qt and PySide6", "LGPL 3.0"),
    ("PyTorch", "BSD 3-Clause"),
    ("Transformers, Tokenizers, Safetensors, Hugging Face Hub", "Apache License 2.0"),
    ("NumPy, psutil, Jinja", "BSD 3-Clause"),
    ("Pygments", "BSD 2-Clause"),
    ("markdown-it-py, platformdirs, gguf", "MIT"),
    ("SmolLM2-135M-Instruct, which the starter model is made from", "Apache License 2.0"),
)


class AboutCard(SettingsCard):
    """Version, components and logs."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("AboutCard", "About"), parent)
        licences = push_button(self, self.tr("Licences"), self._show_licences)
        logs = push_button(self, self.tr("Open logs"), self._open_logs)
        self.add_row(
            self.tr("Switchyard {0}").format(version()),
            self.tr("Python {0}, Qt {1}").format(platform.python_version(), PySide6.__version__),
            licences,
        )
        self.add_row(self.tr("Logs"), self.tr("Contain no prompts and no answers: {0}").format(log_dir()), logs)
        self.diagnosis = Diagnosis(self)
        self.diagnosis.written.connect(self._on_written)
        self.diagnosis.problem.connect(self._on_problem)
        self.save_report = push_button(self, self.tr("Save report…"), lambda: ask_where_to_report(self, self._write))
        self.report_words = self.add_row(
            self.tr("Report"),
            self.tr(
                "One file to attach to a report of a fault: versions, hardware, what was found, the end of the logs. "
            )
            + self.tr("No prompts, no names; nothing is sent."),
            self.save_report,
        )

    def close_down(self) -> None:
        """Stops a report that is being written."""
        self.diagnosis.close()

    def _write(self, path: Path) -> None:
        self.save_report.setEnabled(False)
        self.report_words.setText(self.tr("Looking at this PC…"))
        self.diagnosis.write(path)

    def _on_written(self, path: Path) -> None:
        self.save_report.setEnabled(True)
        self.report_words.setText(self.tr("It is in {0}: read it before you pass it on.").format(path))

    def _on_problem(self, sentence: str) -> None:
        self.save_report.setEnabled(True)
        self.report_words.setText(sentence)

    def _open_logs(self) -> None:
        private_folder(log_dir())
        QDesktopServices.openUrl(QUrl.fromLocalFile(str(log_dir())))

    def _show_licences(self) -> None:
        dialog = LicencesDialog(self)
        dialog.exec()
        dialog.deleteLater()


class LicencesDialog(QDialog):
    """Every component and its licence, with the full text of the one bundled here."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Licences"))
        self.resize(640, 520)
        text = QPlainTextEdit(self)
        text.setReadOnly(True)
        text.setTabChangesFocus(True)
        text.setAccessibleName(self.tr("Licences"))
        font_licence = (resources_dir() / "fonts" / "OFL.txt").read_text(encoding="utf-8")
        listed = "\n".join(f"{part}\n    {licence}" for part, licence in _LICENCES)
        text.setPlainText(f"{listed}\n\n\n{font_licence}")
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close, self)
        buttons.rejected.connect(self.reject)
        vbox(text, buttons, into=self, margins=(20, 20, 20, 20), gap=16)
