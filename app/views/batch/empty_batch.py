"""Shown on the batch page while there is no job: what to do first, and which files are accepted."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QScrollArea, QVBoxLayout, QWidget

from app.icons import IconMark
from app.theme import set_look

ICON_PX = 36
WIDTH_PX = 620


class EmptyBatch(QScrollArea):
    """Scrolls if the window is too small.

    Signals: `file_wanted`, `folder_wanted`: to choose one.
    """

    file_wanted = Signal()
    folder_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        content = QWidget(self)
        self._area = QFrame(content)
        self._area.setObjectName("dropArea")
        self._area.setMaximumWidth(WIDTH_PX)
        title = QLabel(self.tr("Drop a file of prompts here"), self._area)
        title.setProperty("role", "title")
        words = QLabel(
            self.tr("Every row is answered, many at a time. The result file keeps the input's columns."), self._area
        )
        kinds = QLabel(
            self.tr(
                "Accepted: csv, tsv, jsonl, parquet, xlsx, txt, md, pdf, docx and html, a folder of such files, "
                "and OpenAI batch files."
            ),
            self._area,
        )
        for label in (title, words, kinds):
            label.setAlignment(Qt.AlignmentFlag.AlignHCenter)
        for label in (words, kinds):
            label.setWordWrap(True)
        words.setProperty("role", "lead")
        kinds.setProperty("role", "secondary")
        self.choose = QPushButton(self.tr("Choose a file…"), self._area)
        self.choose.setProperty("kind", "primary")
        self.choose.clicked.connect(self.file_wanted)
        self.choose_folder = QPushButton(self.tr("Choose a folder…"), self._area)
        self.choose_folder.clicked.connect(self.folder_wanted)
        buttons = QHBoxLayout()
        buttons.setSpacing(12)
        buttons.addStretch(1)
        buttons.addWidget(self.choose)
        buttons.addWidget(self.choose_folder)
        buttons.addStretch(1)
        column = QVBoxLayout(self._area)
        column.setContentsMargins(32, 40, 32, 40)
        column.setSpacing(10)
        column.addWidget(IconMark("batch", "muted", ICON_PX, self._area), 0, Qt.AlignmentFlag.AlignHCenter)
        column.addWidget(title)
        column.addWidget(words)
        column.addSpacing(10)
        column.addLayout(buttons)
        column.addSpacing(10)
        column.addWidget(kinds)
        row = QHBoxLayout()
        row.addStretch(1)
        row.addWidget(self._area, 1000)
        row.addStretch(1)
        page = QVBoxLayout(content)
        page.setContentsMargins(20, 20, 20, 20)
        page.addStretch(2)
        page.addLayout(row)
        page.addStretch(3)
        self.setWidget(content)

    def set_over(self, over: bool) -> None:
        """Whether an accepted drag is over the page."""
        set_look(self._area, "over", "true" if over else "false")
