"""The page for a PC without a model: what this PC is, what suits it, and the starter beside that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import QCoreApplication, QEvent, Signal
from PySide6.QtGui import QHideEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QBoxLayout, QProgressBar, QPushButton, QWidget

from app.services.downloads import Downloads
from app.services.engine_client import EngineClient, EngineState
from app.services.engine_part import EnginePart, PartStage
from app.services.hub import Hub
from app.services.installation import StarterDownload
from app.services.library import Library
from app.services.settings import Settings
from app.theme import scaled
from app.widgets.asking import ask_path
from app.widgets.chip import ElidedLabel
from app.widgets.downloads_card import DownloadsCard, FolderChoice, ask_token_of, before_cancelling, download_words
from app.widgets.fit_table import Presence
from app.widgets.flow_layout import Flow
from app.widgets.page import CHAT, MODELS, SETTINGS, Page
from app.widgets.quantities import count, file_size, memory
from app.widgets.recommendations import RecommendationList
from app.widgets.scaffold import (
    Card,
    PageBody,
    add_items,
    hbox,
    muted_label,
    push_button,
    set_message,
    text_label,
    vbox,
    warning_label,
)
from app.widgets.starter_offer import StarterOffer
from engine.common.footprint import without_headroom
from engine.common.settings import STARTER
from engine.tuning.machine_state import MachineLook

if TYPE_CHECKING:
    from engine.checkpoint.downloads.queue import Download
    from engine.checkpoint.library import LibraryEntry
    from engine.common.model_info import ModelInfo
    from engine.parts.wheels import EngineChoice
    from engine.tuning.fit import Recommendation


translate = QCoreApplication.translate


def parts_words(look: MachineLook) -> str:
    lines, probe = [], look.probe
    gpu = probe.compute_gpu
    if gpu is not None:
        has = translate("FirstRun", "{0} with {1}")
        lines.append(has.format(gpu.name, memory(gpu.total_bytes)) if gpu.total_bytes else gpu.name)
    cores = probe.physical_cores or probe.usable_cpus
    counted = (
        translate("FirstRun", "1 core")
        if cores == 1
        else translate("FirstRun", "{0} cores", "", cores).format(count(cores))
    )
    lines.append(translate("FirstRun", "{0} of RAM, {1}").format(memory(probe.ram_bytes), counted))
    if look.free_for_files:
        free = file_size(look.free_for_files)
        lines.append(translate("FirstRun", "{0} free on the disk for models").format(free))
    return "\n".join(lines)


def meaning_words(look: MachineLook) -> str:
    probe, gpu = look.probe, look.probe.compute_gpu
    room = without_headroom(probe.ram_available_bytes)
    room += (gpu.free_bytes or 0) if gpu is not None and look.device else 0
    fits = translate(
        "FirstRun",
        "Models of up to about {0} run from memory; parts of larger ones are read from the disk as they answer, which "
        "takes longer.",
    ).format(file_size(room))  # beside the sizes of files that are recommended
    if probe.lacks_avx2:
        old = translate("FirstRun", "This processor has no AVX2: everything works, but takes several times as long.")
        fits = f"{fits} {old}"
    if gpu is not None and look.device:
        return translate("FirstRun", "Graphics card and processor share the work.") + " " + fits
    if gpu is not None:
        return translate("FirstRun", "The graphics card cannot be used here: the processor does the work.") + " " + fits
    return translate("FirstRun", "There is no graphics card for models: the processor does the work.") + " " + fits


def engine_words(choice: EngineChoice | None) -> tuple[str, str]:
    """(what is fetched for this PC, why that)."""
    if choice is None:
        return translate("FirstRun", "Looking at this PC…"), ""
    cards = "; ".join(choice.cards) or translate("FirstRun", "no graphics card that PyTorch can use")
    if choice.reused is not None:
        words = translate("FirstRun", "Found: {0}. Everything is here already, and is prepared for this version.")
        return words.format(cards), choice.why
    sizes = file_size(choice.download_bytes), file_size(choice.unpacked_bytes)
    comes = translate("FirstRun", "It is fetched once: {0}, about {1} on the disk when it is unpacked.").format(*sizes)
    if choice.why:
        suits = translate("FirstRun", "The engine with PyTorch for {0} suits this PC.").format(choice.build_name)
    else:
        suits = translate("FirstRun", "Found: {0}. The engine comes with PyTorch for {1}.")
        suits = suits.format(cards, choice.build_name)
    return f"{suits} {comes}", choice.why


def step_words(stage: PartStage, step: str) -> str:
    if stage is not PartStage.INSTALLING:
        return ""
    return {
        "checking": translate("FirstRun", "Checking what was fetched…"),
        "unpacking": translate("FirstRun", "Unpacking…"),
        "testing": translate("FirstRun", "Testing it on this PC…"),
        "finishing": translate("FirstRun", "Finishing…"),
    }.get(step, translate("FirstRun", "Installing…"))


_OFFERS = (PartStage.OFFERED, PartStage.FAILED)
_BAR_STEPS = 1000


class EngineCard(Card):
    """Hidden where the engine is there.

    Signals: `settings_wanted`, for a mirror or a proxy.
    """

    settings_wanted = Signal()

    def __init__(self, part: EnginePart, parent: QWidget | None = None) -> None:
        super().__init__(translate("EngineCard", "First, the engine"), parent)
        self._part = part
        self.text = muted_label(self, role="")
        self.why = muted_label(self)
        self.state = muted_label(self)
        self.problem = warning_label(self)
        self.bar = QProgressBar(self)
        self.bar.setTextVisible(False)
        self.bar.setAccessibleName(self.tr("Progress of the engine"))
        self.get = self._button(self.tr("Get the engine and the starter"), lambda: part.fetch(starter=True))
        self.get.setProperty("kind", "primary")
        self.alone = self._button(self.tr("Engine only"), part.fetch)
        self.resume = self._button(self.tr("Resume"), part.fetch)
        self.again = self._button(self.tr("Try again"), part.fetch)
        self.pause = self._button(self.tr("Pause"), part.pause)
        self.cancel = self._button(self.tr("Cancel"), part.cancel)
        self.file = self._button(self.tr("Use a file…"), self._choose)
        self.file.setToolTip(self.tr("For a computer without a network: files that another computer has fetched"))
        self.network = self._button(self.tr("Mirror and proxy…"), self.settings_wanted.emit)
        for quiet in (self.file, self.network):
            quiet.setProperty("kind", "quiet")
        add_items(self.body, self.text, self.why, self.bar, self.state, self.problem)
        self.head.addWidget(self.network)
        buttons = (self.get, self.alone, self.resume, self.again, self.pause, self.cancel, self.file)
        self.body.addWidget(Flow(*buttons, parent=self))
        part.changed.connect(self._show_state)
        part.ready.connect(self._show_state)
        self._show_state()

    def _button(self, text: str, do: Callable[[], object]) -> QPushButton:
        return push_button(self, text, lambda: do())  # without Qt's "checked"

    def _choose(self) -> None:
        kinds = self.tr("The engine's files (*.zip *.whl)")
        ask_path(self, self.tr("The engine's files"), self._part.use_files, kinds=kinds)

    def _show_state(self) -> None:
        part, stage = self._part, self._part.stage
        had_focus = any(button.hasFocus() for button in (self.get, self.alone, self.resume, self.pause, self.again))
        download = part.download
        about, why = engine_words(part.choice)
        self.text.setText(about)
        set_message(self.why, why)
        set_message(self.problem, part.problem if stage is PartStage.FAILED else "")
        on_way = stage in (PartStage.FETCHING, PartStage.PAUSED)
        words = download_words(download) if on_way and download is not None else step_words(stage, part.step)
        set_message(self.state, words)
        self.bar.setVisible(on_way or stage is PartStage.INSTALLING)
        if on_way and download is not None and download.total_bytes:
            self.bar.setRange(0, _BAR_STEPS)
            self.bar.setValue(_BAR_STEPS * download.done_bytes // download.total_bytes)
        else:
            self.bar.setRange(0, 0)
        shown = {
            self.get: stage is PartStage.OFFERED,
            self.alone: stage is PartStage.OFFERED,
            self.resume: stage is PartStage.PAUSED,
            self.again: stage is PartStage.FAILED,
            self.pause: stage is PartStage.FETCHING and download is not None,
            self.cancel: on_way and download is not None,
            self.file: stage in _OFFERS and part.choice is not None,
            self.network: stage in (*_OFFERS, PartStage.FETCHING, PartStage.PAUSED),
        }
        for button, is_shown in shown.items():
            button.setVisible(is_shown)
        if had_focus:  # not to Cancel, which the next key would press
            following = next((each for each in (self.resume, self.pause, self.again) if shown[each]), None)
            if following is not None:
                following.setFocus()
        self.setVisible(part.is_needed)


WANTED_KEY = "first_model"
"""Setting: the download to load when it is here, be it in a later window."""
SIDE_PX = 28
GAP_PX = 16
WIDEST_PX = 1136
COLUMNS_FROM_PX = 840
"""Page width, at the standard font size, from which there are two columns."""


MOST_ROWS = 3


class HereCard(Card):
    """The largest few; hidden if there are none.

    Signals:
        chosen(LibraryEntry): to be used from now on.
    """

    chosen = Signal(object)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("HereCard", "Already on this PC"), parent)
        self._shown: tuple[LibraryEntry, ...] = ()
        self._rows: list[QWidget] = []
        self._more = muted_label(self)
        self.body.addWidget(self._more)
        self.hide()

    @property
    def buttons(self) -> tuple[QPushButton, ...]:
        return tuple(button for row in self._rows for button in row.findChildren(QPushButton))

    def show_models(self, entries: Sequence[LibraryEntry]) -> None:
        usable = sorted((one for one in entries if not one.problem), key=lambda one: -one.bytes_on_disk)
        if tuple(usable) != self._shown:
            self._shown = tuple(usable)
            for row in self._rows:
                self.body.removeWidget(row)
                row.hide()
                row.deleteLater()
            self._rows = [self._row(entry) for entry in usable[:MOST_ROWS]]
            for at, row in enumerate(self._rows):
                self.body.insertWidget(1 + at, row)
            rest = len(usable) - len(self._rows)
            one, more = (
                self.tr("One more is on the Models page."),
                self.tr("{0} more are on the Models page.", "", rest),
            )
            self._more.setText(one if rest == 1 else more.format(rest))
            self._more.setVisible(rest > 0)
        self.setVisible(bool(usable))

    def _row(self, entry: LibraryEntry) -> QWidget:
        row = QWidget(self)
        name = ElidedLabel(row, tone="head")
        name.set_full_text(entry.name)
        where = entry.origin if entry.is_in_place else ""
        about = ElidedLabel(row, role="secondary")
        about.set_full_text(" · ".join(filter(None, (file_size(entry.bytes_on_disk), entry.precision_words, where))))
        button = push_button(
            row, self.tr("Use"), lambda: self.chosen.emit(entry), name=self.tr("Use {0}").format(entry.name)
        )
        hbox((vbox(name, about, gap=0), 1), button, into=row, gap=12)
        return row


class FirstRunPage(Page):
    """Nothing is downloaded before a click; the first model that arrives becomes the default one and is loaded.

    Signals:
        load_wanted: load the default model, which was just chosen.
        file_wanted: open a model that lies elsewhere.
    """

    load_wanted = Signal()
    file_wanted = Signal()

    def __init__(
        self,
        client: EngineClient,
        hub: Hub,
        downloads: Downloads,
        library: Library,
        starter: StarterDownload,
        settings: Settings,
        part: EnginePart,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._part = part
        self._client, self._hub, self._downloads, self._library = client, hub, downloads, library
        self._settings = settings
        self._is_needed = client.model is None
        """Until the first model is loaded or chosen: what arrives later is nobody's first model."""
        self._asked: set[str] = set()
        """References whose download is being prepared."""
        self.engine = EngineCard(part, self)
        self.machine = Card(self.tr("This PC"), self)
        self.recommended = Card(self.tr("Recommended for this PC"), self)
        self.folder = FolderChoice(settings, self.recommended)
        self.recommended.head.addWidget(self.folder)
        self.list = RecommendationList(self.recommended, primary="balanced")
        self.progress = DownloadsCard(self)
        self.here = HereCard(self)
        self.starter_card = Card(self.tr("Just try the starter"), self)
        about = self.tr(
            "A small Mixture of Experts that runs on any machine, converted here from a PyPI package, for a first "
            "look. It gets facts wrong and may repeat itself."
        )
        self.starter = StarterOffer(starter, about, self.starter_card)
        self.starter_card.body.addWidget(self.starter)
        self._parts = muted_label(self.machine, role="")
        self._meaning = muted_label(self.machine)
        self._note = muted_label(self.recommended, self.tr("Looking at this PC…"))
        self.problem = warning_label(self)
        self._lay_out()
        self._connect()
        self.setAccessibleName(self.tr("Choose a first model"))

    def close_down(self) -> None:
        self.folder.close_down()

    # --- building ---

    def _lay_out(self) -> None:
        greeting = text_label(self, self.tr("Welcome to Switchyard"))
        greeting.setObjectName("greeting")
        self._lead = muted_label(self, role="lead")
        add_items(self.machine.body, self._parts, self._meaning)
        add_items(self.recommended.body, self._note, self.list)
        ways = (
            (self.tr("Open a model file…"), self.file_wanted.emit),
            (self.tr("Search for others…"), lambda: self.page_wanted.emit(MODELS)),
            (self.tr("Use a remote server…"), lambda: self.page_wanted.emit(SETTINGS)),
            (self.tr("Go to the chats"), lambda: self.page_wanted.emit(CHAT)),
        )
        self.ways = [self._way(text, do) for text, do in ways]
        left = vbox(gap=-1)
        right = vbox(gap=-1)
        for column, cards in (
            (left, (self.engine, self.progress, self.recommended)),
            (right, (self.machine, self.here)),
        ):
            column.setSpacing(GAP_PX)
            add_items(column, *cards)
        right.addWidget(self.starter_card)
        for column in (left, right):
            column.addStretch(1)
        self._columns = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self._columns.setSpacing(GAP_PX)
        self._columns.addLayout(left, 5)
        self._columns.addLayout(right, 3)
        above = (greeting, self._lead, self.problem, 8)
        others = Flow(*self.ways, parent=self)
        body = PageBody(self, *above, self._columns, 4, others, widest_px=WIDEST_PX, margins=SIDE_PX, gap=6)
        self.lay_out(body=body)
        self._show_lead()
        self._fit()

    def _way(self, text: str, do: Callable[[], object]) -> QPushButton:
        return push_button(self, text, do, kind="quiet")

    def _connect(self) -> None:
        self._client.state_changed.connect(self._on_state)
        self._client.model_loaded.connect(self._end)
        self._hub.looked.connect(self._show_machine)
        self.folder.room_changed.connect(self._hub.download_to)
        self._library.listed.connect(self._on_listed)
        self._downloads.changed.connect(self._show_models)
        self._downloads.finished.connect(self._on_finished)
        self._downloads.problem.connect(self._on_problem)
        self.list.wanted.connect(self._get)
        self.here.chosen.connect(self._use)
        self.starter.ready.connect(self._on_starter)
        self.engine.settings_wanted.connect(lambda: self.page_wanted.emit(SETTINGS))
        self._part.changed.connect(self._show_lead)
        self._part.ready.connect(self._on_engine)
        self.progress.pause_wanted.connect(self._downloads.pause)
        self.progress.resume_wanted.connect(self._downloads.resume)
        self.progress.move_wanted.connect(self._downloads.move)
        self.progress.limit_wanted.connect(self._downloads.set_limit)
        self.progress.cancel_wanted.connect(self._cancel)
        self.progress.token_wanted.connect(lambda one: ask_token_of(one, self._downloads, self))

    # --- what is shown ---

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._hub.look_at_machine(self._settings.engine("").device)
        self._library.look()
        self.folder.look()
        self._downloads.watch(on=True)

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._downloads.watch(on=False)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._fit()

    def _fit(self) -> None:
        wide = self.width() >= scaled(COLUMNS_FROM_PX)
        direction = QBoxLayout.Direction
        self._columns.setDirection(direction.LeftToRight if wide else direction.TopToBottom)

    def _show_lead(self) -> None:
        self.starter_card.setVisible(not self._part.is_needed)  # it comes with the engine, or after it
        self._lead.setText(
            self.tr("First the engine, then a model. Nothing is downloaded before you click.")
            if self._part.is_needed
            else self.tr("Choose a first model. Nothing is downloaded before you click.")
        )

    def _show_machine(self) -> None:
        look = self._hub.look
        if look is not None:
            self._parts.setText(parts_words(look))
            self._meaning.setText(meaning_words(look))
        self._show_models()

    def _show_models(self) -> None:
        from engine.checkpoint.downloads.queue import line_speed

        offered = self._hub.recommendations
        set_message(self._note, "" if offered else self._why_none())
        downloads = self._downloads.entries
        on_way: dict[str, Presence] = {one.reference: "downloading" for one in downloads}
        on_way |= dict.fromkeys(self._asked, "downloading")
        here: dict[str, Presence] = {
            one.reference: "here" for one in offered if self._library.entry_from(one.reference)
        }
        self.list.show_recommendations(offered, line_speed(), on_way | here)
        self.progress.show_downloads(downloads, self._downloads.limit)
        self.here.show_models(self._library.entries)

    def _why_none(self) -> str:
        if self._hub.look is None:
            return self.tr("Looking at this PC…")
        return self.tr("No model of the catalogue suits this PC: the starter runs everywhere.")

    # --- what people want ---

    def _get(self, recommendation: Recommendation) -> None:
        entry = self._library.entry_from(recommendation.reference)
        if entry is not None:
            self._use(entry)
            return
        self._is_needed = self._client.model is None
        set_message(self.problem, "")
        self._asked.add(recommendation.reference)
        self._show_models()
        self._downloads.add_reference(recommendation.reference, self._on_added)

    def _on_added(self, download: Download) -> None:
        self._asked.clear()
        if self._is_needed:
            self._settings.set(WANTED_KEY, download.reference)

    def _on_problem(self, sentence: str) -> None:
        self._asked.clear()
        set_message(self.problem, sentence)
        self._show_models()

    def _cancel(self, key: str) -> None:
        download = self._downloads.entry(key)
        if download is not None:
            before_cancelling(download, self, lambda: self._downloads.cancel(key))

    def _on_finished(self, download: Download) -> None:
        if self._is_needed:
            self._settings.set(WANTED_KEY, download.reference)
            self._library.look()

    def _on_listed(self) -> None:
        self._show_models()
        wanted = self._settings.get(WANTED_KEY, "")
        entry = self._library.entry_from(wanted) if wanted else None
        if entry is not None and self._is_needed and self._client.state is not EngineState.LOADING:
            self._use(entry)

    def _use(self, entry: LibraryEntry) -> None:
        self._begin(entry.name)

    def _on_state(self, state: EngineState) -> None:
        """The chat says how far a model is that is being loaded, be it a file that was opened or dropped here."""
        if state is EngineState.LOADING and self.isVisible():
            self.page_wanted.emit(CHAT)

    def _end(self, model: ModelInfo | None = None) -> None:
        has_default = self._settings.default_model != STARTER or self._library.entry(STARTER) is not None
        if model is not None and self._is_needed and not has_default:
            self._settings.default_model = model.path  # a file that was opened: else the next start would ask again
        self._is_needed = False
        self._settings.set(WANTED_KEY, "")

    def _on_starter(self) -> None:
        """It may have been got on another page: then a model that people use stays theirs."""
        is_free = self._client.model is None and self._settings.default_model == STARTER
        if is_free or self.isVisible():
            self._begin(STARTER)

    def _on_engine(self) -> None:
        """The window loads what is there; where that is nothing, the starter comes, if it was asked for."""
        self._show_lead()
        is_wanted, self._part.wants_starter = self._part.wants_starter, False
        is_chosen = self._settings.default_model != STARTER or self._library.entry(STARTER) is not None
        if is_wanted and not is_chosen and not self._downloads.entries:
            self.starter.begin()

    def _begin(self, model: str) -> None:
        self._end()
        self._settings.default_model = model
        if self._part.is_needed:  # it is loaded when the engine is there
            return
        self.load_wanted.emit()
        if self.isVisible():
            self.page_wanted.emit(CHAT)
