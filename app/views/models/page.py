"""The Models page: what is on this PC, what suits it, what the hub has, and what is being downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from PySide6.QtCore import Qt, QTimer, QUrl, Signal
from PySide6.QtGui import (
    QDesktopServices,
    QDragEnterEvent,
    QDropEvent,
    QHideEvent,
    QKeySequence,
    QShowEvent,
)
from PySide6.QtWidgets import QWidget

from app.models.library import with_opened
from app.services.background import timer
from app.services.downloads import Downloads
from app.services.engine_client import EngineClient
from app.services.hub import Hub, RepositoryAnswer, Trouble
from app.services.library import SOON_MS, Library, ModelSpeeds, Work
from app.services.settings import Settings
from app.views.models.on_this_pc import FoldersDialog, OnThisPcCard
from app.views.models.phrases import ended_words
from app.views.models.search_card import SearchCard, SearchLine, page_of
from app.widgets.asking import ask, ask_model, ask_path
from app.widgets.banner import Banner, Toast
from app.widgets.downloads_card import DownloadsCard, FolderChoice, TokenDialog, ask_token_of, before_cancelling
from app.widgets.fields import dropped_model
from app.widgets.fit_table import Presence
from app.widgets.page import Page, add_shortcut
from app.widgets.quantities import file_size
from app.widgets.scaffold import PageBody, PageHeader, push_button
from app.widgets.starter_offer import StarterOffer
from engine.checkpoint.downloads.queue import Download, line_speed
from engine.checkpoint.hub import Candidate
from engine.checkpoint.library import LibraryEntry
from engine.checkpoint.model_directories import Room
from engine.common.settings import STARTER
from engine.tuning.fit import FitCard, FitRow, Recommendation

LEAST_SEARCH_PX = 240


class ModelsPage(Page):
    """Gets its services from outside; downloads go on whichever page is shown.

    Signals: `load_wanted(str)`, a path; `unload_wanted`.
    """

    load_wanted = Signal(str)
    unload_wanted = Signal()

    def __init__(
        self,
        client: EngineClient,
        settings: Settings,
        library: Library,
        downloads: Downloads,
        hub: Hub,
        speeds: ModelSpeeds,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._client, self._settings, self._speeds = client, settings, speeds
        self._library, self._downloads, self._hub = library, downloads, hub
        self._predicted: dict[str, float] = {}
        self._answer: RepositoryAnswer | None = None
        self._load_when_done: set[str] = set()
        self._choose_next = ""
        self.setAcceptDrops(True)
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.setAccessibleName(self.tr("Models"))
        # In the order in which Tab goes through them.
        self.header = PageHeader(self.tr("Models"), self)
        self.search_line = SearchLine(self)
        self.folders_button = push_button(self, self.tr("Folders…"))
        self.import_button = push_button(self, self.tr("Import…"))
        self.trouble = Banner("warning", self)
        self.trouble.add_action(self.tr("Dismiss"), self.trouble.hide, kind="quiet")
        self.downloads = DownloadsCard(self)
        self.here = OnThisPcCard(self)
        self.search = SearchCard(self.search_line, self)
        self.folder = FolderChoice(settings, self)
        self.toast = Toast(self)
        self._soon = timer(self, self._show_models, SOON_MS, once=True)
        self._lay_out()
        self._connect()
        self._show_models()
        self._show_downloads()
        self._show_offers()

    def add_starter(self, offer: StarterOffer) -> None:
        self.here.body.insertWidget(self.here.body.count() - 1, offer)
        offer.follow(self._library)

    def close_down(self) -> None:
        self.folder.close_down()

    # --- files dropped on the page --------------------------------------------------------------------

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if dropped_model(event.mimeData()) is not None:
            event.acceptProposedAction()

    def dropEvent(self, event: QDropEvent) -> None:
        model = dropped_model(event.mimeData())
        if model is not None:
            event.acceptProposedAction()
            self._library.bring_in(model)

    # --- showing --------------------------------------------------------------------------------------

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._library.look()
        self.folder.look()
        self._downloads.watch(on=True)
        self._hub.look_at_machine(self._settings.engine("").device)

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._downloads.watch(on=False)

    def _show_models(self) -> None:
        model = self._client.model
        self.here.show_models(
            with_opened(self._library.entries, model),
            self._library.problems,
            loaded=model.path if model is not None else "",
            default=self._settings.default_model,
            predicted=self._predicted,
        )
        if self._choose_next:
            self.here.choose(self._choose_next)

    def _on_listed(self) -> None:
        self._show_models()
        self._choose_next = ""
        unknown = [one for one in self._library.entries if one.can_chat and not one.measured_tokens_per_s]
        self._speeds.ask(str(one.path) for one in unknown)
        self._show_presence()

    def _on_speed(self, path: str, tokens_per_s: float, _is_measured: bool) -> None:
        self._predicted[path] = tokens_per_s
        if not self._soon.isActive():  # many at once, if they were known
            self._soon.start()

    def _show_downloads(self) -> None:
        self.downloads.show_downloads(self._downloads.entries, self._downloads.limit)
        self._show_presence()

    def _show_offers(self) -> None:
        self.search.show_offers(self._hub.offers if self._hub.look is not None else None, line_speed())
        self._show_presence()

    def _show_presence(self) -> None:
        offered = [one.reference for one in self._hub.offers]
        self.search.show_presence(
            self._presence([*offered, *(row.candidate.reference for row in self.search.fit.rows)])
        )

    def _presence(self, references: Iterable[str]) -> dict[str, Presence]:
        coming: dict[str, Presence] = {one.reference: "downloading" for one in self._downloads.entries}
        return coming | {one: "here" for one in references if self._library.entry_from(one) is not None}

    # --- models on this PC ----------------------------------------------------------------------------

    def _set_default(self, model: LibraryEntry) -> None:
        self._settings.default_model = model.name if self._library.entry(model.name) is model else str(model.path)

    def _ask_remove(self, model: LibraryEntry) -> None:
        words = self.tr("It frees {0} once the trash is emptied. Its converted weights are deleted.").format(
            file_size(model.bytes_on_disk)
        )
        if model.also:
            stays = self.tr("This is the copy in {0}. The one in {1} stays, and is listed instead.")
            words += " " + stays.format(model.path.parent, ", ".join(str(path.parent) for _origin, path in model.also))
        ask(
            self,
            self.tr("Move {0} to the trash?").format(model.name),
            words,
            [(self.tr("Move to the trash"), "destroy", lambda: self._remove(model))],
        )

    def _remove(self, model: LibraryEntry) -> None:
        if self._settings.default_model in (model.name, str(model.path)):
            self._settings.default_model = STARTER
        self._library.remove(model)

    def _reveal(self, model: LibraryEntry) -> None:
        folder = model.path if model.path.is_dir() else model.path.parent
        QDesktopServices.openUrl(QUrl.fromLocalFile(str(folder)))

    def _on_work_ended(self, work: Work) -> None:
        if isinstance(work.result, LibraryEntry):
            self._choose_next = str(work.result.path)
        if work.problem:
            self.trouble.show_text(work.problem)
        elif words := ended_words(work):
            self.toast.show_text(words)

    def open_folders(self) -> FoldersDialog:
        dialog = FoldersDialog(self)
        dialog.changed.connect(self._library.look)
        dialog.changed.connect(self.folder.look)
        dialog.open()
        return dialog

    # --- the hub --------------------------------------------------------------------------------------

    def _on_opened(self, answer: RepositoryAnswer) -> None:
        self._answer = answer
        self.search.show_repository(answer)
        self._judge()

    def _on_setting(self, key: str) -> None:
        if key == "default_model":
            self._show_models()
        elif key == "kv_precision":
            self._judge()

    def _judge(self) -> None:
        limits = self._hub.limits(self._settings.engine("").kv_precision)
        if self._answer is not None and self._answer.shaped and limits is not None:
            self._hub.judge(self._answer.shaped, self.search.fit.wanted(limits))

    def _on_judged(self, card: FitCard) -> None:
        is_first = not self.search.fit.rows
        self.search.fit.show_card(card)
        self._show_presence()
        if is_first:
            self._scroll_to_search()

    def _on_room(self, room: Room) -> None:
        self._hub.download_to(room)
        self._judge()

    def _on_looked(self) -> None:
        if self._hub.look is not None:
            self.search.fit.show_machine(self._hub.look)
        self._show_offers()
        self._judge()

    def _download(self, row: FitRow) -> None:
        entry = self._library.entry_from(row.candidate.reference)
        if entry is not None:
            self.load_wanted.emit(str(entry.path))
        elif row.candidate.repository.gated:
            self._ask_token_before(row.candidate)
        else:
            self._downloads.add(row.candidate, self._on_added)

    def _ask_token_before(self, candidate: Candidate) -> None:
        """Of a model whose makers ask for something first."""
        repository = candidate.repository

        def go_on() -> None:
            self._downloads.add(candidate, self._on_added)

        def on_known(has_token: bool) -> None:
            if has_token:
                go_on()
            else:
                self._open_token_dialog(repository.id, page_of(repository), host, "", go_on)

        host = QUrl(page_of(repository)).host()
        self._downloads.ask_token(host, on_known)

    def _ask_token_to_read(self, trouble: Trouble) -> None:
        """Of a repository that cannot even be read without."""
        reference = self.search.reference
        self._open_token_dialog(
            reference,
            trouble.link,
            QUrl(trouble.link).host(),
            trouble.sentence,
            lambda: self.search.read_again(reference),
        )

    def _open_token_dialog(
        self, name: str, page: str, host: str, sentence: str, then: Callable[[], object]
    ) -> TokenDialog:
        def save(token: str) -> None:
            self._downloads.save_token(host, token, lambda _stays: then())

        dialog = TokenDialog(name, page, host, sentence, save, self)
        dialog.open()
        return dialog

    def _ask_anyway(self, row: FitRow) -> None:
        ask(
            self,
            self.tr("Load {0} anyway?").format(row.candidate.label),
            " ".join(filter(None, (row.why, row.load_anyway))),
            [
                (
                    self.tr("Download {0} and load it").format(file_size(row.bytes)),
                    "do",
                    lambda: self._downloads.add(row.candidate, self._on_added_to_load),
                )
            ],
        )

    def _on_added_to_load(self, download: Download) -> None:
        self._load_when_done.add(download.key)
        self._on_added(download)

    def _on_added(self, download: Download) -> None:
        self.scrolling.verticalScrollBar().setValue(0)
        self.toast.show_text(
            self.tr("{0} is being downloaded; it goes on when you leave this page.").format(download.title)
        )

    def _take(self, recommendation: Recommendation) -> None:
        entry = self._library.entry_from(recommendation.reference)
        if entry is not None:
            self.load_wanted.emit(str(entry.path))
        else:
            self._downloads.add_reference(recommendation.reference, self._on_added)

    def _on_finished(self, download: Download) -> None:
        self._library.look()
        self._choose_next = str(download.folder)
        if download.key in self._load_when_done:
            self._load_when_done.discard(download.key)
            self.load_wanted.emit(str(download.folder))
            return
        self.toast.show_text(
            self.tr("{0} is on this PC now.").format(download.title),
            self.tr("Load it"),
            lambda: self.load_wanted.emit(str(download.folder)),
        )

    def _ask_cancel(self, key: str) -> None:
        download = self._downloads.entry(key)
        if download is not None:
            before_cancelling(download, self, lambda: self._downloads.cancel(key))

    # --- building -------------------------------------------------------------------------------------

    def _connect(self) -> None:
        library, downloads, hub, here = self._library, self._downloads, self._hub, self.here
        library.listed.connect(self._on_listed)
        library.work_changed.connect(self._show_work)
        library.ended.connect(self._on_work_ended)
        self._speeds.found.connect(self._on_speed)
        self._client.model_loaded.connect(self._show_models)
        self._client.state_changed.connect(self._show_models)
        self._settings.changed.connect(self._on_setting)
        here.load_wanted.connect(lambda model: self.load_wanted.emit(str(model.path)))
        here.unload_wanted.connect(self.unload_wanted)
        here.default_wanted.connect(self._set_default)
        here.verify_wanted.connect(library.verify)
        here.folder_wanted.connect(self._reveal)
        here.move_wanted.connect(
            lambda model: ask_path(
                self, self.tr("Folder to move it to"), lambda to: library.move(model, to), folder=True
            )
        )
        here.export_wanted.connect(
            lambda model: ask_path(
                self, self.tr("Folder for the copy"), lambda to: library.export(model, to), folder=True
            )
        )
        here.converted_wanted.connect(library.remove_converted)
        here.remove_wanted.connect(self._ask_remove)
        here.cancel_wanted.connect(library.cancel)
        downloads.changed.connect(self._show_downloads)
        downloads.finished.connect(self._on_finished)
        downloads.problem.connect(self.trouble.show_text)
        self.downloads.pause_wanted.connect(downloads.pause)
        self.downloads.resume_wanted.connect(downloads.resume)
        self.downloads.cancel_wanted.connect(self._ask_cancel)
        self.downloads.move_wanted.connect(downloads.move)
        self.downloads.limit_wanted.connect(downloads.set_limit)
        self.downloads.token_wanted.connect(lambda download: ask_token_of(download, downloads, self))
        self.folder.room_changed.connect(self._on_room)
        hub.looked.connect(self._on_looked)
        hub.found.connect(self.search.show_found)
        hub.opened.connect(self._on_opened)
        hub.judged.connect(self._on_judged)
        self.search.search_wanted.connect(hub.search)
        self.search.repository_wanted.connect(hub.open)
        self.search.token_wanted.connect(self._ask_token_to_read)
        self.search.fit.limits_changed.connect(self._judge)
        self.search.fit.download_wanted.connect(self._download)
        self.search.fit.anyway_wanted.connect(self._ask_anyway)
        self.search.offer.wanted.connect(self._take)
        self.search.used.connect(self._scroll_to_search)
        self.import_button.clicked.connect(lambda: ask_model(self, library.bring_in))
        self.folders_button.clicked.connect(self.open_folders)
        add_shortcut(self, QKeySequence.StandardKey.Find, self.tr("Search the hub"), self._focus_search)
        add_shortcut(self, QKeySequence.StandardKey.Open, self.tr("Import a model"), self.import_button.click)

    def _show_work(self) -> None:
        self.here.work.show_work(self._library.work)

    def _scroll_to_search(self) -> None:
        """As soon as there is something to show: the card then needs the whole page."""
        QTimer.singleShot(0, self, lambda: self.scrolling.verticalScrollBar().setValue(self.search.y() - 8))

    def _focus_search(self) -> None:
        self.search.field.setFocus()
        self.search.field.selectAll()

    def _lay_out(self) -> None:
        self.header.set_middle(self.search_line, least_px=LEAST_SEARCH_PX, stretch=1)
        self.header.add_buttons(self.folders_button, self.import_button)
        self.search.head.addWidget(self.folder)
        self.scrolling = PageBody(self, self.downloads, self.here, self.search)
        self.lay_out(self.header, self.trouble, body=self.scrolling, foot=self.toast)
