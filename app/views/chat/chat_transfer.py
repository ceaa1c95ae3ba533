"""Chats to files, to paper, and in from files: the dialogs, the progress above the chat, and what came of it.

On paper, as PDF and as HTML a chat is for reading: dates, who spoke, the visible path, formulas as pictures. Nothing in
it refers to another place: a picture that an answer links to is a link, so that opening a document asks no other
machine for anything.
"""

from __future__ import annotations

import base64
import html
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PySide6.QtCore import QCoreApplication, QEventLoop, QMarginsF, QObject, QUrl
from PySide6.QtGui import (
    QColor,
    QFont,
    QImage,
    QPagedPaintDevice,
    QPageLayout,
    QPageSize,
    QPdfWriter,
    QTextBlockFormat,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextImageFormat,
)
from PySide6.QtWidgets import QDialog, QWidget
from shiboken6 import delete

from app.services.background import timer
from app.services.chat_files import ChatFiles, ImportReport, file_name
from app.services.chat_store import ChatStore, Conversation, Message, MessageTree
from app.services.chat_store.json_format import Merged
from app.services.chat_store.other_programs import LeftOut
from app.services.formula_process import COLOUR
from app.services.formulas import Formula, Picture, formulas
from app.theme import FAMILY, LIGHT
from app.views.chat.presenter import ChatPresenter
from app.widgets.answer_text import (
    InertDocument,
    Style,
    formula_in,
    formulas_in,
    markdown,
    print_document,
    read_markdown,
    write_markdown,
)
from app.widgets.asking import ask_paths, ask_where
from app.widgets.banner import Banner, Toast
from app.widgets.quantities import count, percent
from engine.common.errors import CancelCheck
from engine.common.files import NewFile, write_whole
from engine.common.plain_text import few_marks

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


PAPER_MARGIN_MM = 20.0
BODY_PX, TITLE_PX = 14, 23
"""Of paper with 96 to the inch."""
_PICTURE_PX = 340
_MATHS_EM = 1.12
"""As in the window: the small letters of formulas are smaller than those of the text around them."""

Draw = Callable[[Iterable[Formula]], Mapping[Formula, str]]
"""The SVG of those formulas that can be drawn."""


def formulas_of(messages: Sequence[Message], *, thoughts: bool) -> set[Formula]:
    answers = [message for message in MessageTree(messages).path() if message.role == "assistant"]
    texts = [text for one in answers for text in (one.content, one.reasoning if thoughts else "") if text]
    return {formula for text in texts for formula in formulas_in(read_markdown(text))}


# --- on paper ---------------------------------------------------------------------------------------


def chat_document(
    conversation: Conversation, messages: Sequence[Message], style: Style, drawn: Mapping[Formula, Picture]
) -> QTextDocument:
    document = InertDocument()
    document.setDefaultFont(style.font)
    _line(document, conversation.title or translate("ChatDocument", "Chat"), px=TITLE_PX, bold=True)
    if conversation.created_at:
        _line(document, _day(conversation.created_at), colour=LIGHT.muted)
    if conversation.system_prompt.strip():
        _line(document, translate("ChatDocument", "System prompt"), bold=True, above=19)
        _line(document, few_marks(conversation.system_prompt))
    for number, message in enumerate(MessageTree(messages).path()):
        _line(document, speaker(message), bold=True, above=19)
        for place, picture in enumerate(message.pictures):
            _picture(document, f"picture:{number}/{place}", picture.data)
        if message.role == "assistant":
            write_markdown(document, read_markdown(message.content), style, drawn)
        elif message.content:
            _line(document, few_marks(message.content))
    return document


def write_pdf(conversation: Conversation, messages: Sequence[Message], path: Path, draw: Draw) -> None:
    """Writes a PDF on A4."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NewFile(path) as new:
        writer = QPdfWriter(str(new.path))
        writer.setCreator("Switchyard")
        writer.setTitle(conversation.title)
        writer.setPageSize(QPageSize(QPageSize.PageSizeId.A4))
        margin = PAPER_MARGIN_MM
        writer.setPageMargins(QMarginsF(margin, margin, margin, margin), QPageLayout.Unit.Millimeter)
        put_on_paper(conversation, messages, writer, draw)
        del writer  # which closes the file
        if not new.path.stat().st_size:
            raise OSError(None, translate("ChatDocument", "nothing could be written there"))
        new.take_place()


def put_on_paper(
    conversation: Conversation, messages: Sequence[Message], device: QPagedPaintDevice, draw: Draw
) -> None:
    svgs = draw(formulas_of(messages, thoughts=False))
    dispatcher = QEventLoop()  # Qt's layout wants timers, which a thread of Python's does not have
    font = QFont(FAMILY)
    font.setPixelSize(BODY_PX)
    style = Style(LIGHT, font)
    drawn = {formula: Picture(svg) for formula, svg in svgs.items()}
    document = chat_document(conversation, messages, style, drawn)
    print_document(document, device, style)
    delete(document)  # here: garbage is collected on any thread
    del dispatcher


def _line(
    document: QTextDocument,
    text: str,
    *,
    px: int = BODY_PX,
    bold: bool = False,
    colour: str = LIGHT.text,
    above: float = 0.0,
) -> None:
    font = QFont(document.defaultFont())
    font.setPixelSize(px)
    font.setWeight(QFont.Weight.DemiBold if bold else QFont.Weight.Normal)
    look = QTextCharFormat()
    look.setFont(font)
    look.setForeground(QColor(colour))
    _new_block(document, above).insertText(text, look)


def _new_block(document: QTextDocument, above: float = 0.0) -> QTextCursor:
    block = QTextBlockFormat()
    block.setTopMargin(above)
    block.setBottomMargin(4)
    cursor = QTextCursor(document)
    cursor.movePosition(QTextCursor.MoveOperation.End)
    if document.isEmpty():
        cursor.setBlockFormat(block)
    else:
        cursor.insertBlock(block, QTextCharFormat())
    return cursor


def _picture(document: QTextDocument, name: str, data: str) -> None:
    image = QImage.fromData(base64.b64decode(data))
    if image.isNull():
        return
    document.addResource(QTextDocument.ResourceType.ImageResource, QUrl(name), image)
    scale = min(1.0, _PICTURE_PX / max(image.width(), image.height()))
    shown = QTextImageFormat()
    shown.setName(name)
    shown.setWidth(image.width() * scale)
    shown.setHeight(image.height() * scale)
    _new_block(document).insertImage(shown)


def speaker(message: Message) -> str:
    if message.role == "assistant":
        name = message.model or translate("ChatDocument", "Assistant")
    else:
        name = translate("ChatDocument", "You")
    return f"{few_marks(name)}{_when(message.created_at)}"


def _when(moment: float) -> str:
    return time.strftime(", %Y-%m-%d %H:%M", time.localtime(moment)) if moment else ""


def _day(moment: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(moment))


# --- HTML -------------------------------------------------------------------------------------------

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="generator" content="Switchyard">
<title>{title}</title>
<style>
:root {{
  color-scheme: light dark;
  --text: #1b1f27; --muted: #5d6779; --page: #fff; --sunken: #f2f4f7; --line: #e2e5ea; --link: #2460c4;
}}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #e6e9ef; --muted: #9aa3b2; --page: #14161a; --sunken: #1b1e24; --line: #2c313a; --link: #7facf8; }}
}}
body {{
  font: 16px/1.55 Inter, system-ui, sans-serif; color: var(--text); background: var(--page);
  margin: 0 auto; max-width: 44rem; padding: 2rem 1.25rem 4rem;
}}
h1 {{ font-size: 1.6rem; margin: 0 0 .25rem; }}
.when {{ color: var(--muted); font-size: .85rem; font-weight: 400; }}
section {{ margin: 1.75rem 0; overflow-wrap: anywhere; }}
section > h2 {{ font-size: .95rem; margin: 0 0 .4rem; }}
.said {{ white-space: pre-wrap; background: var(--sunken); border-radius: 12px; padding: .7rem 1rem; }}
details {{ color: var(--muted); margin-bottom: .6rem; }}
pre {{ background: var(--sunken); border-radius: 8px; padding: .8rem 1rem; overflow-x: auto; }}
code {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .9em; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
th, td {{ border: 1px solid var(--line); padding: .3rem .6rem; text-align: left; }}
blockquote {{ border-left: 3px solid var(--line); margin-left: 0; padding-left: 1rem; color: var(--muted); }}
img {{ max-width: 100%; border-radius: 8px; }}
img.maths {{ border-radius: 0; }}
p.maths {{ text-align: center; }}
@media (prefers-color-scheme: dark) {{ img.maths {{ filter: invert(1); }} }}
a {{ color: var(--link); }}
</style>
</head>
<body>
<h1>{title}</h1>
<div class="when">{day}</div>
{turns}
</body>
</html>
"""


def chat_html(conversation: Conversation, messages: Sequence[Message], draw: Draw) -> str:
    """The visible path of a chat as one page that loads nothing and runs nothing."""
    render = _renderer(draw(formulas_of(messages, thoughts=True)))
    turns: list[str] = []
    if conversation.system_prompt.strip():
        name = translate("ChatDocument", "System prompt")
        turns.append(_section(name, 0.0, f'<div class="said">{_plain(conversation.system_prompt)}</div>'))
    for message in MessageTree(messages).path():
        if message.role == "assistant":
            name = message.model or translate("ChatDocument", "Assistant")
            body = render(message.content)
            if message.reasoning:
                words = html.escape(translate("ChatDocument", "Thoughts"))
                body = f"<details><summary>{words}</summary>{render(message.reasoning)}</details>{body}"
        else:
            name = translate("ChatDocument", "You")
            shown = "".join(f'<p><img alt="" src="{html.escape(picture.url)}"></p>' for picture in message.pictures)
            body = shown + (f'<div class="said">{_plain(message.content)}</div>' if message.content else "")
        turns.append(_section(name, message.created_at, body))
    title = html.escape(few_marks(conversation.title or translate("ChatDocument", "Chat")))
    day = _day(conversation.created_at) if conversation.created_at else ""
    return _PAGE.format(title=title, day=day, turns="\n".join(turns))


def write_html(conversation: Conversation, messages: Sequence[Message], path: Path, draw: Draw) -> None:
    """Writes it to a file."""
    write_whole(path, chat_html(conversation, messages, draw))


def _section(name: str, moment: float, body: str) -> str:
    when = f' <span class="when">{_when(moment).removeprefix(", ")}</span>' if moment else ""
    return f"<section><h2>{html.escape(few_marks(name))}{when}</h2>\n{body}\n</section>"


def _plain(text: str) -> str:
    return html.escape(few_marks(text))


def _renderer(svgs: Mapping[Formula, str]) -> Callable[[str], str]:
    from markdown_it.renderer import RendererHTML  # imported late: it takes a while, and few chats become pages

    reader, renderer = markdown(), RendererHTML()

    def maths(tokens: Any, index: int, _options: object, _env: object) -> str:
        token = tokens[index]
        is_block = token.type == "maths_block"
        formula = Formula(token.info, display=True) if is_block else formula_in(token.info, token.content)
        svg = svgs.get(formula) if token.info else None
        words = html.escape(few_marks(token.content))
        shown = f"<code>{words}</code>" if svg is None else _formula(svg, words)
        return f'<p class="maths">{shown}</p>\n' if is_block else shown

    renderer.rules.update({"image": _picture_link, "maths": maths, "maths_block": maths})  # type: ignore[dict-item]
    return lambda text: str(renderer.render(reader.parse(text), reader.options, {}))


def _formula(svg: str, words: str) -> str:
    picture = Picture(svg)
    depth, width = (f"{length * _MATHS_EM:.3f}em" for length in (-picture.descent, picture.width))
    data = base64.b64encode(svg.replace(COLOUR, "#000").encode()).decode("ascii")
    look = f"vertical-align: {depth}; width: {width}"
    return f'<img class="maths" alt="{words}" style="{look}" src="data:image/svg+xml;base64,{data}">'


def _picture_link(tokens: Any, index: int, _options: object, _env: object) -> str:
    token = tokens[index]
    address = html.escape(str(token.attrGet("src") or ""))
    words = html.escape(token.content or translate("ChatDocument", "picture"))
    return f'<a rel="noreferrer" href="{address}">{words}</a>'
