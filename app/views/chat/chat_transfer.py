"""Chats to files, to paper, and in from files: the dialogs, the progress above the chat, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QObject
from PySide6.QtWidgets import QDialog, QWidget

from app.services.background import timer
from app.services.chat_files import ChatFiles, ImportReport, file_name
from app.services.chat_store import ChatStore, Conversation, Message
from app.services.chat_store.json_format import Merged
from app.services.chat_store.other_programs import LeftOut
from app.services.formulas import formulas
from app.views.chat.presenter import ChatPresenter
from app.widgets.asking import ask_paths, ask_where
from app.widgets.banner import Banner, Toast
from app.widgets.chat_document import put_on_paper, write_html, write_pdf
from app.widgets.quantities import count, percent
from engine.common.errors import CancelCheck

translate = QCoreApplication.translate

LISTED_MS = 700
"""How often chats that are being imported are listed: sorting thousands takes a moment."""
_MOST_PROBLEMS = 3


class ChatTransfer(QObject):
    def __init__(self, presenter: ChatPresenter, store: ChatStore, banner: Banner, toast: Toast, page: QWidget) -> None:
        super().__init__(page)
        self._presenter, self._toast, self._page = presenter, toast, page
        self._formulas = formulas()
        writers = {".html": self._write_html, ".pdf": self._write_pdf}
        self.files = ChatFiles(store, writers, self)
        self.banner = banner
        self._cancel = self.banner.add_action(self.tr("Cancel"), self._on_cancel, kind="quiet")
        self._close = self.banner.add_action(self.tr("Dismiss"), self.banner.hide, kind="quiet")
        self._doing = ""
        self._unlisted: list[Conversation] = []
        self._listing = timer(self, self._list, LISTED_MS, once=True)
        self.files.progressed.connect(self._on_progress)
        self.files.merged.connect(self._on_merged)
        self.files.imported.connect(self._on_imported)
        self.files.exported.connect(self._on_exported)
        self.files.failed.connect(self._end)

    def ask_export(self, conversation_ids: Sequence[str] | None) -> None:
        ids = conversation_ids or [conversation.id for conversation in self._presenter.list_model.kept]
        one = self._presenter.list_model.conversation(ids[0]) if conversation_ids and len(ids) == 1 else None
        suffixes = (
            {translate("Chat", "Markdown and JSON of every chat (*.zip)"): "zip"}
            if one is None
            else {
                translate("Chat", "Markdown, as shown (*.md)"): "md",
                translate("Chat", "PDF, as shown (*.pdf)"): "pdf",
                translate("Chat", "Web page, as shown (*.html)"): "html",
                translate("Chat", "JSON, with all versions and branches (*.json)"): "json",
            }
        )
        name = translate("Chat", "Switchyard chats") if one is None else file_name(one)
        ask_where(self._page, translate("Chat", "Export"), name, suffixes, lambda path: self.export(ids, path))

    def ask_import(self) -> None:
        kinds = translate("Chat", "Chats of Switchyard, ChatGPT and LM Studio (*.zip *.json *.md *.markdown)")
        ask_paths(self._page, translate("Chat", "Import chats"), self.import_files, kinds=kinds)

    def export(self, conversation_ids: Sequence[str], path: Path) -> None:
        self._presenter.flush()
        self._begin(self.tr("Writing {0}…").format(path.name))
        self.files.export(conversation_ids, path)

    def import_files(self, paths: Sequence[Path]) -> None:
        names = paths[0].name if len(paths) == 1 else self.tr("{0} files", "", len(paths)).format(count(len(paths)))
        self._begin(self.tr("Importing {0}…").format(names))
        self.files.import_files(paths)

    def print_chat(self, conversation_id: str) -> None:
        from PySide6.QtPrintSupport import QPrintDialog, QPrinter  # imported late: few print

        printer = QPrinter(QPrinter.PrinterMode.HighResolution)
        known = self._presenter.list_model.conversation(conversation_id)
        printer.setDocName(known.title if known is not None else "")
        dialog = QPrintDialog(printer, self._page)
        dialog.setOption(QPrintDialog.PrintDialogOption.PrintPageRange, on=False)

        def put(chat: Conversation, messages: Sequence[Message], cancelled: CancelCheck) -> None:
            put_on_paper(chat, messages, printer, lambda wanted: self._formulas.draw_all(wanted, cancelled))

        dialog.accepted.connect(lambda: self.files.with_chat(conversation_id, put))
        dialog.finished.connect(dialog.deleteLater)
        QDialog.open(dialog)  # QPrintDialog's own asks for a receiver

    def close(self) -> None:
        self.files.close()

    # --- on the thread that writes ---

    def _write_html(self, chat: Conversation, messages: Sequence[Message], path: Path, cancelled: CancelCheck) -> None:
        write_html(chat, messages, path, lambda wanted: self._formulas.draw_all(wanted, cancelled))

    def _write_pdf(self, chat: Conversation, messages: Sequence[Message], path: Path, cancelled: CancelCheck) -> None:
        write_pdf(chat, messages, path, lambda wanted: self._formulas.draw_all(wanted, cancelled))

    # --- what comes of it ---

    def _begin(self, words: str) -> None:
        self._doing = words
        self._cancel.show()
        self._close.hide()
        self.banner.show_text(words)

    def _end(self, words: str) -> None:
        self._cancel.hide()
        self._close.show()
        self.banner.show_text(words)

    def _on_cancel(self) -> None:
        self.files.cancel()
        self._cancel.hide()

    def _on_progress(self, share: float, chats: int) -> None:
        if not self._cancel.isHidden():
            words = self.tr("{0} {1}, {2} chats so far").format(self._doing, percent(share), count(chats))
            self.banner.show_text(words)

    def _on_merged(self, merged: Merged) -> None:
        for folder in merged.folders:
            self._presenter.list_model.put_folder(folder)
        self._unlisted += (*merged.added, *merged.grown)
        if not self._listing.isActive():
            self._listing.start()

    def _list(self) -> None:
        unlisted, self._unlisted = self._unlisted, []
        if unlisted:
            self._presenter.add_imported(unlisted)

    def _on_imported(self, report: ImportReport) -> None:
        self._listing.stop()
        self._list()
        unread = report.unread
        if report.is_cancelled or unread.damaged or unread.is_cut_off or any(unread.left.values()) or unread.problems:
            self._end(import_words(report))
        else:  # nothing that anybody has to read
            self.banner.hide()
            self._toast.show_text(import_words(report))
        if report.first is not None and report.added + report.grown + report.known == 1:
            self._presenter.open(report.first.id)  # one of many would only take people away from what they do

    def _on_exported(self, path: str) -> None:
        self.banner.hide()
        self._toast.show_text(self.tr("Written to {0}").format(path))


def import_words(report: ImportReport) -> str:
    parts: list[str] = []
    if report.is_cancelled:
        parts.append(translate("Chat", "The import was cancelled; what was imported until then stays."))
    if report.added or report.grown or report.known:
        parts.append(
            _chats_of(report.added, translate("Chat", "1 chat"), translate("Chat", "{0} chats", "", report.added))
        )
        if report.grown:
            parts.append(
                _chats_of(
                    report.grown,
                    translate("Chat", "1 that was here has new messages."),
                    translate("Chat", "{0} that were here have new messages.", "", report.grown),
                    bare=True,
                )
            )
        if report.known:
            parts.append(
                _chats_of(
                    report.known,
                    translate("Chat", "1 was already here and is unchanged."),
                    translate("Chat", "{0} were already here and are unchanged.", "", report.known),
                    bare=True,
                )
            )
    unread = report.unread
    if unread.damaged:
        parts.append(
            _chats_of(
                unread.damaged,
                translate("Chat", "1 chat is damaged and could not be read."),
                translate("Chat", "{0} chats are damaged and could not be read.", "", unread.damaged),
                bare=True,
            )
        )
    if unread.is_cut_off:
        parts.append(translate("Chat", "The file ends in the middle: what comes after that is not in it."))
    left = [_LEFT_OUT[kind]().format(count(n)) for kind, n in sorted(unread.left.items()) if n]
    if left:
        parts.append(translate("Chat", "Left out: {0}.").format(", ".join(left)))
    for name, why in unread.problems[:_MOST_PROBLEMS]:
        parts.append(translate("Chat", "{0} was not imported: {1}.").format(name, why))
    if len(unread.problems) > _MOST_PROBLEMS:
        more = len(unread.problems) - _MOST_PROBLEMS
        parts.append(translate("Chat", "Neither were {0} other files.", "", more).format(count(more)))
    return " ".join(parts)


def _chats_of(number: int, one: str, many: str, *, bare: bool = False) -> str:
    words = one if number == 1 else many.format(count(number))
    return words if bare else translate("Chat", "Imported: {0}.").format(words)


_LEFT_OUT: dict[LeftOut, Callable[[], str]] = {
    LeftOut.TOOLS: lambda: translate("Chat", "tool calls ({0})"),
    LeftOut.PICTURES: lambda: translate("Chat", "pictures ({0})"),
    LeftOut.FILES: lambda: translate("Chat", "attached files ({0})"),
    LeftOut.SETTINGS: lambda: translate("Chat", "settings of single chats ({0})"),
    LeftOut.EMPTY: lambda: translate("Chat", "chats without messages ({0})"),
    LeftOut.OTHER: lambda: translate("Chat", "parts of an unknown kind ({0})"),
}
