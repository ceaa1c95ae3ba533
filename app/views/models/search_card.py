"""Search the hub: words in, repositories out, and the chosen one judged on this machine."""

from __future__ import annotations

from PySide6.QtCore import (
    QAbstractListModel,
    QEvent,
    QModelIndex,
    QPersistentModelIndex,
    QPointF,
    QRectF,
    QSize,
    Qt,
    QUrl,
    Signal,
)
from PySide6.QtGui import QDesktopServices, QFont, QFontMetricsF, QPainter, QPen
from PySide6.QtWidgets import (
    QAbstractItemView,
    QBoxLayout,
    QHBoxLayout,
    QLineEdit,
    QListView,
    QPushButton,
    QSizePolicy,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QVBoxLayout,
    QWidget,
)

from app.services.hub import RepositoryAnswer, SearchAnswer, Trouble
from app.theme import ColourName, scaled, themed
from app.views.models.phrases import found_text, found_words
from app.widgets.card import Card, muted_label, set_message, warning_label
from app.widgets.chip import ElidedLabel
from app.widgets.fit_card import FitCardView
from app.widgets.quantities import SEPARATOR
from app.widgets.small_font import draw_elided, small_font
from engine.checkpoint.hub import Found, Repository, is_reference
from engine.checkpoint.hub.repository import HUGGINGFACE, MODELSCOPE, parse_reference

FOUND_ROLE = Qt.ItemDataRole.UserRole + 1
WIDE_EM = 92
_LIST_PX, _ROWS = 260, 9

_Index = QModelIndex | QPersistentModelIndex


class SearchCard(Card):
    """Signals:
    search_wanted(str): words to look for.
    repository_wanted(str): a repository was chosen, or named outright.
    token_wanted(Trouble): the repository is not open to everybody.
    """

    search_wanted = Signal(str)
    repository_wanted = Signal(str)
    token_wanted = Signal(object)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.set_heading(self.tr("Search the hub"))
        self._reference = ""
        self._page = ""
        self.field = QLineEdit(self)
        self.field.setPlaceholderText(self.tr("Name of a model, ORG/NAME or a pasted link"))
        self.field.setAccessibleName(self.tr("Search the hub"))
        self.field.setClearButtonEnabled(True)
        self.button = QPushButton(self.tr("Search"), self)
        self.hint = muted_label(self)
        self.trouble = warning_label(self)
        self.results = ResultsView(self)
        self.name = ElidedLabel(self)
        self.name.setProperty("role", "heading")
        self.facts = ElidedLabel(self)
        self.facts.setProperty("role", "secondary")
        self.open_page = QPushButton(self.tr("Open its page"), self)
        self.open_page.setProperty("kind", "quiet")
        self.token = QPushButton(self.tr("Access token…"), self)
        self._trouble: Trouble | None = None
        self.fit = FitCardView(self)
        self._lay_out()
        self.field.returnPressed.connect(self._search)
        self.button.clicked.connect(self._search)
        self.results.chosen.connect(self._choose)
        self.open_page.clicked.connect(lambda: QDesktopServices.openUrl(QUrl(self._page)))
        self.token.clicked.connect(lambda: self.token_wanted.emit(self._trouble))
        self._show_hint()

    @property
    def reference(self) -> str:
        """The repository that is shown; empty for none."""
        return self._reference

    def show_found(self, answer: SearchAnswer) -> None:
        """The results of a search, or why there are none."""
        self.button.setEnabled(True)
        self.results.show_found(answer.results)
        self.results.setVisible(bool(answer.results))
        set_message(self.hint, "")
        if answer.trouble is not None:
            set_message(self.hint if answer.trouble.is_network else self.trouble, answer.trouble.sentence)
        elif not answer.results:
            set_message(self.hint, self.tr("Nothing was found for “{0}”: try fewer words.").format(answer.text))
        if answer.results:
            self.results.setCurrentIndex(self.results.rows.index(0))

    def show_repository(self, answer: RepositoryAnswer) -> None:
        """What a repository holds, as far as it has been read."""
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
        if is_reference(text):
            self.results.show_found(())
            self.results.hide()
            set_message(self.hint, "")
            self._open(text)
            self.fit.ask_for(parse_reference(text).what)
            return
        self.button.setEnabled(False)
        set_message(self.hint, self.tr("Searching…"))
        self.search_wanted.emit(text)

    def _choose(self, found: Found) -> None:
        self._open(found.id if found.hub == HUGGINGFACE else f"{found.hub}:{found.id}")

    def _open(self, reference: str) -> None:
        if reference != self._reference or not self.fit.trouble.isHidden():
            self.read_again(reference)

    def read_again(self, reference: str) -> None:
        """Reads a repository, also if it is shown already: a token may have opened it."""
        self._reference = reference
        self.name.set_full_text(reference)
        self.facts.hide()
        self.open_page.hide()
        self.token.hide()
        self.right.show()
        self.fit.clear()
        self.fit.show_reading(0, 0)
        self.repository_wanted.emit(reference)

    def _show_hint(self) -> None:
        set_message(
            self.hint,
            self.tr("Before anything is downloaded you see how each file would run on this machine, and how fast."),
        )
        self.results.hide()
        self.right.hide()

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

    def _lay_out(self) -> None:
        line = QHBoxLayout()
        line.setSpacing(8)
        line.addWidget(self.field, 1)
        line.addWidget(self.button)
        head = QHBoxLayout()
        head.setSpacing(8)
        titles = QVBoxLayout()
        titles.setSpacing(0)
        titles.addWidget(self.name)
        titles.addWidget(self.facts)
        head.addLayout(titles, 1)
        head.addWidget(self.open_page, 0, Qt.AlignmentFlag.AlignTop)
        for button in (self.token, self.fit.download, self.fit.anyway):
            head.addWidget(button, 0, Qt.AlignmentFlag.AlignTop)
        self.right = QWidget(self)
        column = QVBoxLayout(self.right)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(8)
        column.addLayout(head)
        column.addWidget(self.fit, 1)
        self._both = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self._both.setSpacing(16)
        self._both.addWidget(self.results, 0, Qt.AlignmentFlag.AlignTop)
        self._both.addWidget(self.right, 1)
        self.body.addLayout(line)
        self.body.addWidget(self.hint)
        self.body.addWidget(self.trouble)
        self.body.addLayout(self._both)


def page_of(repository: Repository) -> str:
    """The address of a repository's page on its hub."""
    return page_at(repository.endpoint, repository.hub, repository.id)


def page_at(endpoint: str, hub: str, name: str) -> str:
    """The page of `ORG/NAME`; empty if the endpoint is no address of the web."""
    if not endpoint.startswith(("https://", "http://")):
        return ""
    return f"{endpoint.rstrip('/')}/{'models/' if hub == MODELSCOPE else ''}{name}"


class ResultList(QAbstractListModel):
    """What a search found; `FOUND_ROLE` gives a `Found`."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._rows: tuple[Found, ...] = ()

    def show(self, found: tuple[Found, ...]) -> None:
        self.beginResetModel()
        self._rows = found
        self.endResetModel()

    def rowCount(self, parent: _Index | None = None) -> int:
        return 0 if parent is not None and parent.isValid() else len(self._rows)

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        if not index.isValid():
            return None
        found = self._rows[index.row()]
        if role == FOUND_ROLE:
            return found
        if role == Qt.ItemDataRole.DisplayRole:
            return found.id
        if role in (Qt.ItemDataRole.AccessibleTextRole, Qt.ItemDataRole.ToolTipRole):
            return found_text(found)
        return None


class ResultsView(QListView):
    """Signals: `chosen(Found)`, when another became current."""

    chosen = Signal(object)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.rows = ResultList(self)
        self.setModel(self.rows)
        self.setItemDelegate(ResultDelegate(self))
        self.setAccessibleName(self.tr("Found on the hub"))
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setMouseTracking(True)
        self.selectionModel().currentChanged.connect(self._on_current)

    def show_found(self, found: tuple[Found, ...]) -> None:
        """Shows these, with none chosen."""
        self.rows.show(found)
        self._fit_height()

    def fit(self, *, wide: bool) -> None:
        """Beside the card, or above it."""
        if wide:
            self.setFixedWidth(scaled(_LIST_PX))
        else:
            self.setMinimumWidth(0)
            self.setMaximumWidth(16_777_215)
            self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._most = _ROWS if wide else 4
        self._fit_height()

    def _fit_height(self) -> None:
        height = self.itemDelegate().sizeHint(QStyleOptionViewItem(), QModelIndex()).height()
        self.setFixedHeight(height * max(1, min(getattr(self, "_most", _ROWS), self.rows.rowCount())))

    def _on_current(self, index: QModelIndex) -> None:
        found = index.data(FOUND_ROLE)
        if isinstance(found, Found):
            self.chosen.emit(found)


class ResultDelegate(QStyledItemDelegate):
    """The name without its maker, and below it the maker and the facts."""

    def __init__(self, view: ResultsView) -> None:
        super().__init__(view)
        self._view = view

    def sizeHint(self, _option: QStyleOptionViewItem, _index: _Index) -> QSize:
        upper, lower = self._fonts()
        return QSize(80, round(QFontMetricsF(upper).lineSpacing() + 2 * QFontMetricsF(lower).lineSpacing() + 14))

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        found: Found = index.data(FOUND_ROLE)
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
        upper, lower = self._fonts()
        maker, _, name = found.id.rpartition("/")
        top = area.top() + 6
        lines: tuple[tuple[str, QFont, ColourName], ...] = (
            (name, upper, "muted" if found.problem else "text"),
            (maker, lower, "muted"),
            (found.problem or found_words(found), lower, "muted"),
        )
        for text, font, colour in lines:
            high = QFontMetricsF(font).lineSpacing()
            place = QRectF(area.left() + 8, top, area.width() - 16, high)
            draw_elided(painter, place, text, font, colour, Qt.TextElideMode.ElideMiddle)
            top += high
        painter.restore()

    def _fonts(self) -> tuple[QFont, QFont]:
        upper = small_font(self._view.font(), 13.5)
        upper.setWeight(QFont.Weight.Medium)
        return upper, small_font(self._view.font(), 12)
