"""File dialogs for export and import."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QDir, Qt
from PySide6.QtWidgets import QFileDialog, QWidget

from app.services.chat_store import Conversation
from app.services.pictures import SUFFIXES
from app.views.chat.phrases import translate


def ask_export_path(parent: QWidget, conversation: Conversation | None, then: Callable[[Path], None]) -> None:
    """Ask for a file to write; one chat can be Markdown, several only JSON."""
    filters = [translate("Chat", "All versions and branches (*.json)")]
    if conversation is not None:
        filters.insert(0, translate("Chat", "Markdown, as shown (*.md)"))
    dialog = QFileDialog(parent, translate("Chat", "Export"), QDir.homePath(), ";;".join(filters))
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
    name = "Switchyard chats" if conversation is None else conversation.title or translate("Chat", "Chat")
    dialog.selectFile(re.sub(r'[\\/:*?"<>|\x00-\x1f]', "-", name).strip(". ")[:80])

    def set_suffix(chosen: str) -> None:
        dialog.setDefaultSuffix("md" if "*.md" in chosen else "json")

    dialog.filterSelected.connect(set_suffix)
    set_suffix(filters[0])
    dialog.fileSelected.connect(lambda path: then(Path(path)))
    dialog.open()


def ask_import_path(parent: QWidget, then: Callable[[Path], None]) -> None:
    """Ask for a file to read."""
    dialog = QFileDialog(
        parent, translate("Chat", "Import chats"), QDir.homePath(), translate("Chat", "Chats (*.json *.md *.markdown)")
    )
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.setFileMode(QFileDialog.FileMode.ExistingFile)
    dialog.fileSelected.connect(lambda path: then(Path(path)))
    dialog.open()


def ask_attachments(parent: QWidget, then: Callable[[list[Path]], None], *, folder: bool = False) -> None:
    """Ask for files to send, or for a folder."""
    endings = " ".join(f"*{suffix}" for suffix in SUFFIXES)
    filters = (translate("Chat", "All files (*)"), translate("Chat", "Pictures ({0})").format(endings))
    title = translate("Chat", "Attach a folder") if folder else translate("Chat", "Attach files")
    dialog = QFileDialog(parent, title, QDir.homePath(), "" if folder else ";;".join(filters))
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.setFileMode(QFileDialog.FileMode.Directory if folder else QFileDialog.FileMode.ExistingFiles)
    dialog.filesSelected.connect(lambda paths: then([Path(path) for path in paths]))
    dialog.open()
