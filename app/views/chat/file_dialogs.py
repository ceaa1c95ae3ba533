"""File dialogs for export and import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QDir, Qt
from PySide6.QtWidgets import QFileDialog, QWidget

from app.services.chat_store import Conversation
from app.views.chat.phrases import translate
from engine.common.pictures import SUFFIXES


def _formats(conversation: Conversation | None) -> dict[str, str]:
    """What a chat, or all of them, can be written as: the words of a filter, and the suffix."""
    if conversation is None:
        return {translate("Chat", "Markdown and JSON of every chat (*.zip)"): "zip"}
    return {
        translate("Chat", "Markdown, as shown (*.md)"): "md",
        translate("Chat", "PDF, as shown (*.pdf)"): "pdf",
        translate("Chat", "Web page, as shown (*.html)"): "html",
        translate("Chat", "JSON, with all versions and branches (*.json)"): "json",
    }


def ask_export_path(parent: QWidget, conversation: Conversation | None, then: Callable[[Path], None]) -> None:
    """Ask for a file to write: of one chat, or of all of them (None)."""
    from app.services.chat_files import file_name  # imported late: the window opens sooner

    suffixes = _formats(conversation)
    filters = list(suffixes)
    dialog = QFileDialog(parent, translate("Chat", "Export"), QDir.homePath(), ";;".join(filters))
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
    name = translate("Chat", "Switchyard chats") if conversation is None else file_name(conversation)
    dialog.selectFile(name)
    dialog.filterSelected.connect(lambda chosen: dialog.setDefaultSuffix(suffixes.get(chosen, "json")))
    dialog.setDefaultSuffix(suffixes[filters[0]])
    dialog.fileSelected.connect(lambda path: then(Path(path)))
    dialog.open()


def ask_import_paths(parent: QWidget, then: Callable[[list[Path]], None]) -> None:
    """Ask for files to read."""
    words = translate("Chat", "Chats of Switchyard, ChatGPT and LM Studio (*.zip *.json *.md *.markdown)")
    dialog = QFileDialog(parent, translate("Chat", "Import chats"), QDir.homePath(), words)
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.setFileMode(QFileDialog.FileMode.ExistingFiles)
    dialog.filesSelected.connect(lambda paths: then([Path(path) for path in paths]))
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
