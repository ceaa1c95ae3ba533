"""Version, licences, and the log folder."""

from __future__ import annotations

import platform

import PySide6
from PySide6.QtCore import QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QPlainTextEdit, QPushButton, QVBoxLayout, QWidget

from app.views.settings.card import SettingsCard
from engine.common.files import private_folder
from engine.common.installed import version
from engine.common.paths import log_dir, resources_dir

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
        super().__init__(parent)
        self.set_heading(self.tr("About"))
        licences = QPushButton(self.tr("Licences"), self)
        licences.clicked.connect(self._show_licences)
        logs = QPushButton(self.tr("Open logs"), self)
        logs.clicked.connect(self._open_logs)
        self.add_row(
            self.tr("Switchyard {0}").format(version()),
            self.tr("Python {0}, Qt {1}").format(platform.python_version(), PySide6.__version__),
            licences,
        )
        self.add_row(self.tr("Logs"), self.tr("Contain no prompts and no answers: {0}").format(log_dir()), logs)

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
        column = QVBoxLayout(self)
        column.setContentsMargins(20, 20, 20, 20)
        column.setSpacing(16)
        column.addWidget(text)
        column.addWidget(buttons)
