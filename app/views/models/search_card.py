"""Get a model: the catalogue, filtered while words are typed, and the hub, searched by them; the chosen one judged on
this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from PySide6.QtCore import QEvent, QModelIndex, QPersistentModelIndex, QPointF, QRectF, QSize, Qt, QUrl, Signal
from PySide6.QtGui import QDesktopServices, QFont, QFontMetricsF, QPainter, QPen
from PySide6.QtWidgets import (
    QAbstractItemView,
    QBoxLayout,
    QListView,
    QPushButton,
    QSizePolicy,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)

from app.models.headed_table import ROW_ROLE, HeadedTable
from app.services.hub import RepositoryAnswer, SearchAnswer, Trouble
from app.theme import ColourName, scaled, themed
from app.views.models.phrases import ability_words, badges, found_text, found_words, offer_facts, offer_line, offer_text
from app.widgets.chip import ElidedLabel, draw_elided, draw_pills, pills_width, small_font
from app.widgets.fields import ComboBox
from app.widgets.fit_card import FitCardView
from app.widgets.fit_table import Presence, draw_verdict_mark, range_words, speed_words, verdict_words
from app.widgets.flow_layout import Flow
from app.widgets.quantities import SEPARATOR, translate
from app.widgets.recommendations import VerdictMark, figures_words, role_words, show_presence
from app.widgets.scaffold import (
    STRETCH,
    TOP,
    Card,
    add_items,
    hbox,
    line_edit,
    muted_label,
    push_button,
    set_message,
    text_label,
    vbox,
    warning_label,
)
from engine.checkpoint.catalogue import ABILITIES
from engine.checkpoint.hub import HUGGINGFACE, MODELSCOPE, Found, Repository, is_reference, parse_reference
from engine.tuning.fit import ROLES, Recommendation

_LIST_PX, _ROWS, _ROWS_ABOVE = 330, 8, 4
_MARK_PX = 12

Row = Recommendation | Found
_Index = QModelIndex | QPersistentModelIndex


def _name(row: Row, _column: int) -> str:
    return row.entry.name if isinstance(row, Recommendation) else row.id


def _words(row: Row) -> str:
    return offer_text(row) if isinstance(row, Recommendation) else found_text(row)


class FoundList(QListView):
    chosen = Signal(object)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.rows = HeadedTable(parent=self, cell=_name, describe=_words)
        self._most = _ROWS
        self.setModel(self.rows)
        self.setItemDelegate(_Delegate(self))
        self.setAccessibleName(self.tr("Models to get"))
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setMouseTracking(True)
        self.setUniformItemSizes(True)
        self.selectionModel().currentChanged.connect(self._on_current)

    @property
    def row(self) -> Row | None:
        row = self.currentIndex().data(ROW_ROLE)
        return row if isinstance(row, Recommendation | Found) else None

    def show_rows(self, rows: tuple[Row, ...]) -> None:
        if rows != self.rows.rows:
            self.rows.show_rows(rows)
        self.setVisible(bool(rows))
        self._fit_height()

    def choose(self, at: int) -> None:
        self.setCurrentIndex(self.rows.index(at, 0))

    def fit(self, *, wide: bool) -> None:
        if wide:
            self.setFixedWidth(scaled(_LIST_PX))
        else:
            self.setMinimumWidth(0)
            self.setMaximumWidth(16_777_215)
            self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._most = _ROWS if wide else _ROWS_ABOVE
        self._fit_height()

    def _fit_height(self) -> None:
        height = self.itemDelegate().sizeHint(QStyleOptionViewItem(), QModelIndex()).height()
        self.setFixedHeight(height * max(1, min(self._most, self.rows.rowCount())))

    def _on_current(self, index: QModelIndex) -> None:
        row = index.data(ROW_ROLE)
        if isinstance(row, Recommendation | Found):
            self.chosen.emit(row)


class _Delegate(QStyledItemDelegate):
    """Three lines: a name and its labels; what it is good at, or its maker; and the facts."""

    def __init__(self, view: FoundList) -> None:
        super().__init__(view)
        self._view = view

    def sizeHint(self, _option: QStyleOptionViewItem, _index: _Index) -> QSize:
        upper, lower, _pill = self._fonts()
        return QSize(80, round(QFontMetricsF(upper).lineSpacing() + 2 * QFontMetricsF(lower).lineSpacing() + 14))

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        row: Row = index.data(ROW_ROLE)
        area = QRectF(option.rect)
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if option.state & QStyle.StateFlag.State_Selected:
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(themed("accent_background"))
            painter.drawRoundedRect(area.adjusted(0, 1, 0, -1), 8, 8)
        else:
            painter.setPen(QPen(themed("border"), 1))
            painter.drawLine(area.bottomLeft() + QPointF(8, -0.5), area.bottomRight() + QPointF(-8, -0.5))
        (upper, lower, pill), pills, mark_px = self._fonts(), list[str](), 0.0
        if isinstance(row, Recommendation):
            name, middle = row.entry.name, translate("Catalogue", row.entry.strengths)
            facts, is_able = offer_line(row), row.speed is not None
            pills, mark_px = badges(row), _MARK_PX + 6.0
        else:
            middle, _, name = row.id.rpartition("/")
            facts, is_able = row.problem or found_words(row), not row.problem
        left, wide, top = area.left() + 8, area.width() - 16, area.top() + 6
        lines: tuple[tuple[str, QFont, ColourName, float], ...] = (
            (name, upper, "text" if is_able else "muted", 0.0),
            (middle, lower, "muted", 0.0),
            (facts, lower, "muted", mark_px),
        )
        for text, font, colour, indent in lines:
            high = QFontMetricsF(font).lineSpacing()
            mode = Qt.TextElideMode.ElideMiddle if font is upper else Qt.TextElideMode.ElideRight
            draw_elided(painter, QRectF(left + indent, top, wide - indent, high), text, font, colour, mode)
            if font is upper and pills:
                after = QFontMetricsF(upper).horizontalAdvance(text) + 10
                while pills and after + pills_width(pills, pill) > wide:
                    pills.pop()
                draw_pills(painter, left + after, top + high / 2, pills, pill, "accent" if _is_first(row) else "border")
            if indent and isinstance(row, Recommendation):
                mark = QRectF(left, top + (high - _MARK_PX) / 2, _MARK_PX, _MARK_PX)
                draw_verdict_mark(painter, mark, row.verdict)
            top += high
        painter.restore()

    def _fonts(self) -> tuple[QFont, QFont, QFont]:
        upper = small_font(self._view.font(), 13.5)
        upper.setWeight(QFont.Weight.Medium)
        return upper, small_font(self._view.font(), 12), small_font(self._view.font(), 11)


def _is_first(row: Row) -> bool:
    """Whether its first label says that it is one to take first."""
    return isinstance(row, Recommendation) and bool(row.role)


@dataclass(frozen=True, slots=True)
class OfferFilter:
    """An offer must hold all of these.

    Attributes:
        words: in its name, its maker's, or what it is good at.
        most_bytes: of the download; 0 for any.
        ability: one of `engine.checkpoint.catalogue.ABILITIES`; empty for any.
        is_free: its licence allows every use.
        runs_well: fast enough for a chat here.
    """

    words: str = ""
    most_bytes: int = 0
    ability: str = ""
    is_free: bool = False
    runs_well: bool = False

    def takes(self, offer: Recommendation) -> bool:
        entry = offer.entry
        text = f"{entry.name} {entry.family} {entry.strengths} {entry.languages} {offer.reference}".casefold()
        return (
            all(word in text for word in self.words.casefold().split())
            and (not self.most_bytes or offer.bytes <= self.most_bytes)
            and (not self.ability or self.ability in entry.abilities)
            and (not self.is_free or entry.is_free)
            and (not self.runs_well or offer.verdict in ("fast", "works"))
        )


def offered(offers: tuple[Recommendation, ...], wanted: OfferFilter) -> tuple[Recommendation, ...]:
    """Those that are wanted: first what is recommended, balanced before fast and large; then as the catalogue has
    them."""
    order = {"balanced": 0, **{role: at for at, role in enumerate(ROLES, 1) if role != "balanced"}}
    return tuple(sorted(filter(wanted.takes, offers), key=lambda one: order.get(one.role, len(order) + 1)))


class OfferView(QWidget):
    """Signals: `wanted(Recommendation)`: download it, or load it if it is here; `files_wanted(str)`, a repository."""

    wanted = Signal(object)
    files_wanted = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.offer: Recommendation | None = None
        self.name = muted_label(self, role="heading")
        self.facts = muted_label(self)
        self.labels = Flow(parent=self)
        self.strengths = muted_label(self, role="")
        self._mark = VerdictMark("works", self)
        self.speed = text_label(self, tone="head", tabular=True)
        self.range = muted_label(self)
        self.why = muted_label(self)
        self.figures = muted_label(self)
        self.unchecked = muted_label(self, self.tr("≈ Size from the catalogue, not checked with the hub."))
        self.get = push_button(self, self.tr("Download"), lambda: self.wanted.emit(self.offer), kind="primary")
        self.files = push_button(self, self.tr("All files…"), self._ask_for_files)
        vbox(
            self.name,
            self.facts,
            self.labels,
            self.strengths,
            hbox(self._mark, self.speed, (self.range, 1), gap=6),
            self.why,
            self.figures,
            Flow(self.get, self.files, parent=self),
            self.unchecked,
            STRETCH,
            into=self,
        )

    def show_offer(self, offer: Recommendation, bytes_per_s: float | None, presence: Presence | None) -> None:
        entry, speed = offer.entry, offer.speed
        if offer != self.offer:
            self.offer = offer
            self.name.setText(entry.name)
            self.facts.setText(offer_facts(offer))
            self.labels.clear()
            for words in filter(None, (role_words(offer.role), *map(ability_words, entry.abilities))):
                label = text_label(self.labels, words, role="pill")
                self.labels.add(label)
            self.labels.setVisible(bool(offer.role or entry.abilities))
            self.strengths.setText(translate("Catalogue", entry.strengths))
            self._mark.set_verdict(offer.verdict)
            self.speed.setText(speed_words(speed) if speed is not None else verdict_words(offer.verdict))
            self.range.setText(f"({range_words(speed)})" if speed is not None else "")
            set_message(self.why, "" if speed is not None else offer.sentence)
            self.unchecked.setVisible("bytes" in entry.unchecked)
            self.files.setAccessibleName(self.tr("All files of {0}").format(entry.name))
        self.figures.setText(figures_words(offer, bytes_per_s, presence))
        show_presence(self.get, entry.name, presence)
        self.get.setVisible(speed is not None or presence is not None)

    def _ask_for_files(self) -> None:
        if self.offer is not None:
            self.files_wanted.emit(self.offer.reference.rpartition(":")[0])


WIDE_EM = 92
_SIZES_GB = (8, 16, 32, 64)


class SearchLine(QWidget):
    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.field = line_edit(self, "", hint=self.tr("Name or words"))
        self.field.setToolTip(self.tr("Filters the catalogue; Enter searches the hub, also for ORG/NAME or a link"))
        self.field.setAccessibleName(self.tr("Search for a model"))
        self.field.setClearButtonEnabled(True)
        self.button = push_button(self, self.tr("Search"))
        hbox((self.field, 1), self.button, into=self)


class SearchCard(Card):
    """Signals:
    search_wanted(str): words to look for.
    repository_wanted(str): a repository was chosen, or named outright.
    token_wanted(Trouble): the repository is not open to everybody.
    used: somebody searches.
    """

    search_wanted = Signal(str)
    repository_wanted = Signal(str)
    token_wanted = Signal(object)
    used = Signal()

    def __init__(self, line: SearchLine, parent: QWidget | None = None) -> None:
        super().__init__(translate("SearchCard", "Get a model"), parent)
        self.reference = ""
        self._page = ""
        self._offers: tuple[Recommendation, ...] = ()
        self._found: tuple[Found, ...] = ()
        self._bytes_per_s: float | None = None
        self._presence: Mapping[str, Presence] = {}
        self._is_looking, self._outcome = True, ""
        self.field, self.button = line.field, line.button
        self.runs_well = self._chip(self.tr("Runs well here"))
        self.is_free = self._chip(self.tr("Apache or MIT licence"))
        self.sizes = self._choice(self.tr("Size"), [(self.tr("Any size"), 0)])
        for gb in _SIZES_GB:
            self.sizes.addItem(self.tr("Up to {0} GB").format(gb), gb * 10**9)
        self.ability = self._choice(self.tr("Good at"), [(self.tr("Good at anything"), "")])
        self.hint = muted_label(self)
        self.trouble = warning_label(self)
        self.results = FoundList(self)
        self.offer = OfferView(self)
        self.name = ElidedLabel(self, role="heading")
        self.facts = ElidedLabel(self, role="secondary")
        self.open_page = push_button(
            self, self.tr("Open its page"), lambda: QDesktopServices.openUrl(QUrl(self._page)), kind="quiet"
        )
        self.token = push_button(self, self.tr("Access token…"), lambda: self.token_wanted.emit(self._trouble))
        self._trouble: Trouble | None = None
        self.fit = FitCardView(self)
        self._lay_out()
        self.field.textEdited.connect(self._on_edited)
        self.field.returnPressed.connect(self._search)
        self.button.clicked.connect(self._search)
        self.results.chosen.connect(self._choose)
        self.offer.files_wanted.connect(self._open)
        self.offer.hide()
        self.right.hide()
        self._show_rows()

    # --- the catalogue --------------------------------------------------------------------------------

    def show_offers(self, offers: tuple[Recommendation, ...] | None, bytes_per_s: float | None) -> None:
        self._offers, self._bytes_per_s, self._is_looking = offers or (), bytes_per_s, offers is None
        known = {ability for offer in self._offers for ability in offer.entry.abilities}
        for ability in ABILITIES:  # of which some model is offered
            if ability in known and self.ability.findData(ability) < 0:
                self.ability.addItem(ability_words(ability), ability)
        self._show_rows()

    def show_presence(self, presence: Mapping[str, Presence]) -> None:
        self._presence = presence
        self.fit.show_presence(presence)
        if (offer := self.offer.offer) is not None:
            self._show_offer(offer)

    @property
    def filter(self) -> OfferFilter:
        return OfferFilter(
            self.field.text().strip(),
            self.sizes.currentData(),
            self.ability.currentData(),
            self.is_free.isChecked(),
            self.runs_well.isChecked(),
        )

    def _show_rows(self) -> None:
        rows: tuple[Row, ...] = (*offered(self._offers, self.filter), *self._found)
        before = self.results.row
        self.results.show_rows(rows)
        if before is None or before not in rows:
            if rows and isinstance(rows[0], Recommendation):
                self.results.choose(0)
        elif self.results.row != before:
            self.results.choose(rows.index(before))
        words = self._outcome
        if not words and self._is_looking:
            words = self.tr("Looking at this machine…")
        elif not words and not rows:
            words = self.tr("Nothing in the catalogue matches: press Enter to search the hub, or remove a filter.")
        set_message(self.hint, words)

    def _on_edited(self) -> None:
        self._found, self._outcome = (), ""
        set_message(self.trouble, "")
        self._show_rows()
        self.used.emit()

    def _show_offer(self, offer: Recommendation) -> None:
        self.offer.show_offer(offer, self._bytes_per_s, self._presence.get(offer.reference))

    # --- the hub --------------------------------------------------------------------------------------

    def show_found(self, answer: SearchAnswer) -> None:
        self.button.setEnabled(True)
        self._found, self._outcome = answer.results, ""
        if answer.trouble is not None and not answer.trouble.is_network:
            set_message(self.trouble, answer.trouble.sentence)
        elif answer.trouble is not None:
            self._outcome = answer.trouble.sentence
        elif not answer.results:
            self._outcome = self.tr("The hub has nothing for “{0}”: try fewer words.").format(answer.text)
        self._show_rows()
        if answer.results:
            self.results.choose(self.results.rows.rowCount() - len(answer.results))

    def show_repository(self, answer: RepositoryAnswer) -> None:
        self._trouble = trouble = answer.trouble
        self.token.setVisible(trouble is not None and trouble.needs_token)
        if trouble is not None:
            self.fit.show_trouble(trouble.sentence)
            return
        self.fit.show_reading(len(answer.shaped), answer.total)
        self.fit.show_models(answer.context_tokens)
        if answer.shaped:
            self._show_head(answer.shaped[0][0].repository)

    def _show_head(self, repository: Repository) -> None:
        self.name.set_full_text(repository.id)
        gated = self.tr("its makers ask you to accept their terms first") if repository.gated else ""
        licence = self.tr("Licence: {0}").format(repository.licence) if repository.licence else ""
        self.facts.set_full_text(SEPARATOR.join(filter(None, (licence, gated))))
        self.facts.setVisible(bool(self.facts.full_text))
        self._page = page_of(repository)
        self.open_page.setVisible(bool(self._page))
        self.open_page.setToolTip(self._page)

    # --- inside ---------------------------------------------------------------------------------------

    def _search(self) -> None:
        text = self.field.text().strip()
        if not text:
            return
        set_message(self.trouble, "")
        self.used.emit()
        if is_reference(text):
            self._open(text)
            self.fit.ask_for(parse_reference(text).what)
            return
        self.button.setEnabled(False)
        self._outcome = self.tr("Searching…")
        self._show_rows()
        self.search_wanted.emit(text)

    def _choose(self, row: Row) -> None:
        if isinstance(row, Recommendation):
            self._show_offer(row)
            self.offer.show()
            self.right.hide()
        else:
            self._open(row.id if row.hub == HUGGINGFACE else f"{row.hub}:{row.id}")

    def _open(self, reference: str) -> None:
        if reference != self.reference or not self.fit.trouble.isHidden():
            self.read_again(reference)
        self.offer.hide()
        self.right.show()

    def read_again(self, reference: str) -> None:
        self.reference = reference
        self.name.set_full_text(reference)
        self.facts.hide()
        self.open_page.hide()
        self.token.hide()
        self.fit.clear()
        self.fit.show_reading(0, 0)
        self.repository_wanted.emit(reference)

    def resizeEvent(self, event: object) -> None:
        super().resizeEvent(event)  # type: ignore[arg-type]
        self._arrange()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange and hasattr(self, "_both"):
            self._arrange()

    def _arrange(self) -> None:
        wide = self.width() >= WIDE_EM * self.fontMetrics().averageCharWidth()
        direction = QBoxLayout.Direction.LeftToRight if wide else QBoxLayout.Direction.TopToBottom
        if self._both.direction() != direction:
            self._both.setDirection(direction)
        self.results.fit(wide=wide)

    def _chip(self, words: str) -> QPushButton:
        chip = push_button(self, words, kind="chip", checkable=True)
        chip.toggled.connect(lambda _on: self._show_rows())
        return chip

    def _choice(self, name: str, items: list[tuple[str, object]]) -> ComboBox:
        box = ComboBox(self, name=name)
        for words, data in items:
            box.addItem(words, data)
        box.activated.connect(lambda _at: self._show_rows())
        return box

    def _lay_out(self) -> None:
        self.filters = Flow(self.runs_well, self.is_free, self.sizes, self.ability, parent=self)
        head = hbox(
            (vbox(self.name, self.facts, gap=0), 1),
            (self.open_page, TOP),
            (self.token, TOP),
            (self.fit.download, TOP),
            (self.fit.anyway, TOP),
        )
        self.right = QWidget(self)
        vbox(head, (self.fit, 1), into=self.right)
        self._both = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self._both.setSpacing(16)
        self._both.addWidget(self.results, 0, Qt.AlignmentFlag.AlignTop)
        self._both.addWidget(self.offer, 1)
        self._both.addWidget(self.right, 1)
        add_items(self.body, self.filters, self.hint, self.trouble, self._both)


def page_of(repository: Repository) -> str:
    return page_at(repository.endpoint, repository.hub, repository.id)


def page_at(endpoint: str, hub: str, name: str) -> str:
    if not endpoint.startswith(("https://", "http://")):
        return ""
    return f"{endpoint.rstrip('/')}/{'models/' if hub == MODELSCOPE else ''}{name}"
