"""The models on this PC and of other servers, to choose one for the chat: opened by its name above it, or Ctrl+M."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import (
    QCoreApplication,
    QEvent,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPointF,
    QRect,
    QRectF,
    QSize,
    QSortFilterProxyModel,
    Qt,
    Signal,
)
from PySide6.QtGui import QFont, QFontMetrics, QKeyEvent, QPainter, QPainterPath
from PySide6.QtWidgets import (
    QAbstractItemView,
    QApplication,
    QFrame,
    QListView,
    QProgressBar,
    QPushButton,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)

from app.models.library import ROW_ROLE, LibraryTable, ModelRow, with_opened
from app.services.background import timer
from app.services.endpoints import Endpoints
from app.services.engine_client import EngineClient, EngineState
from app.services.engine_request import LoadingPace
from app.services.library import SOON_MS, Library, ModelSpeeds
from app.services.settings import Settings
from app.theme import BODY_PX, ColourName, scaled, tabular, themed
from app.views.chat.phrases import about_text, choice_text, sent_text, speed_text, title_text
from app.widgets.flow_layout import Flow
from app.widgets.page import Popover, note_keys
from app.widgets.quantities import SEPARATOR, duration, file_size
from app.widgets.scaffold import add_items, hbox, line_edit, push_button, text_label, vbox
from app.widgets.starter_offer import StarterOffer
from engine.remote.endpoint import is_remote, remote_name

WIDTH_PX = 460
MOST_ROWS = 6


RADIUS = 8
INSET = 10
GAP = 12
ABOVE = 8
DOT_PX = 8


translate = QCoreApplication.translate


def loading_words(pace: LoadingPace) -> str:
    progress = pace.progress
    if progress is None:
        return translate("Loading", "Opening the model")
    words = {
        "reading": translate("Loading", "Reading weights"),
        "converting": translate("Loading", "Converting weights; later starts skip this"),
    }.get(progress.phase, translate("Loading", "Loading the model"))
    amount = translate("Loading", "{0} of {1}").format(file_size(progress.done), file_size(progress.total))
    left = translate("Loading", "{0} left").format(duration(pace.left_s)) if pace.left_s is not None else ""
    return SEPARATOR.join(filter(None, (words, amount, left)))


class ModelDelegate(QStyledItemDelegate):
    def sizeHint(self, _option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex) -> QSize:
        lines = QFontMetrics(self._font(BODY_PX)).lineSpacing() + QFontMetrics(self._font(12.5)).lineSpacing()
        return QSize(0, lines + 2 * ABOVE + 2 + self._heading_height(index.data(ROW_ROLE)))

    def _heading_height(self, row: ModelRow) -> int:
        return QFontMetrics(self._font(12.5)).lineSpacing() + 2 * ABOVE if row.heading else 0

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        row: ModelRow = index.data(ROW_ROLE)
        whole: QRect = option.rect
        rect = whole.adjusted(0, self._heading_height(row), 0, 0)
        state: QStyle.StateFlag = option.state
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if row.heading:
            above = whole.adjusted(INSET, ABOVE, -INSET, 0)
            above.setHeight(QFontMetrics(self._font(12.5)).lineSpacing())
            self._line(painter, above, self._font(12.5, QFont.Weight.DemiBold), row.heading, "", "muted")
        pill = QPainterPath()
        pill.addRoundedRect(QRectF(rect).adjusted(1, 1, -1, -1), RADIUS, RADIUS)
        if state & QStyle.StateFlag.State_Selected:
            painter.fillPath(pill, themed("accent_background"))
        elif state & QStyle.StateFlag.State_MouseOver:
            painter.fillPath(pill, themed("hover"))
        if state & QStyle.StateFlag.State_HasFocus:
            painter.setPen(themed("accent"))
            painter.drawPath(pill)
        title, small = self._font(BODY_PX, QFont.Weight.Medium), self._font(12.5)
        inside = rect.adjusted(INSET, ABOVE, -INSET, -ABOVE)
        upper = QRect(inside.topLeft(), QSize(inside.width(), QFontMetrics(title).lineSpacing()))
        lower = QRect(upper.bottomLeft(), QSize(inside.width(), QFontMetrics(small).lineSpacing()))
        lower.translate(0, 2)
        problem = row.entry.problem
        speed, source = ("", "") if problem else speed_text(row)
        self._line(painter, upper, title, title_text(row), speed, "muted" if problem else "text", row.is_loaded)
        self._line(painter, lower, small, problem or about_text(row), source, "danger" if problem else "muted")
        painter.restore()

    def _line(
        self,
        painter: QPainter,
        room: QRect,
        font: QFont,
        text: str,
        beside: str,
        colour: ColourName,
        has_dot: bool = False,
    ) -> None:
        """A text from the left, elided, and a short one at the right edge."""
        metrics = QFontMetrics(font)
        middle = Qt.AlignmentFlag.AlignVCenter
        painter.setFont(font)
        painter.setPen(themed(colour))
        left = room.adjusted(0, 0, -(metrics.horizontalAdvance(beside) + GAP) if beside else 0, 0)
        if beside:
            right = QRect(room)
            right.setLeft(left.right() + GAP)
            painter.drawText(right, Qt.AlignmentFlag.AlignRight | middle, beside)
        if has_dot:
            painter.save()
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(themed("pcie"))
            painter.drawEllipse(QPointF(left.left() + DOT_PX / 2, left.center().y() + 1), DOT_PX / 2, DOT_PX / 2)
            painter.restore()
            left.adjust(DOT_PX + 7, 0, 0, 0)
        elided = metrics.elidedText(text, Qt.TextElideMode.ElideRight, left.width())
        painter.drawText(left, Qt.AlignmentFlag.AlignLeft | middle, elided)

    def _font(self, px: float, weight: QFont.Weight = QFont.Weight.Normal) -> QFont:
        view = self.parent()
        font = tabular(view.font()) if isinstance(view, QWidget) else QFont()
        font.setPixelSize(max(8, scaled(px)))
        font.setWeight(weight)
        return font


class ModelPicker(Popover):
    """The library is looked through whenever it opens.

    Signals:
        load_wanted(str): the path of a model.
        chosen(str): who answers in this chat: `endpoint:NAME/MODEL`, or empty for the model on this PC.
        cancel_wanted, unload_wanted: stop loading; free the memory of the model.
        file_wanted: open a model that lies elsewhere.
        more_wanted: look for others.
    """

    load_wanted = Signal(str)
    chosen = Signal(str)
    cancel_wanted = Signal()
    unload_wanted = Signal()
    file_wanted = Signal()
    more_wanted = Signal()

    def __init__(
        self,
        client: EngineClient,
        settings: Settings,
        library: Library,
        speeds: ModelSpeeds,
        endpoints: Endpoints,
        parent: QWidget,
    ) -> None:
        super().__init__(self.tr("Models"), parent)
        self._client = client
        self._settings = settings
        self._library = library
        self._speeds = speeds
        self._endpoints = endpoints
        self._remote = ""
        self._predicted: dict[str, float] = {}
        self._models = LibraryTable(("",), lambda row, _column: title_text(row), choice_text, self)
        self.rows = FoundModels(self)
        self.rows.setSourceModel(self._models)
        self.filter = line_edit(self, self.tr("Find a model"), clears=True, hints=True)
        self.list = QListView(self)
        self.list.setAccessibleName(self.tr("Models"))
        self.list.setModel(self.rows)
        self.list.setItemDelegate(ModelDelegate(self.list))
        self.list.setMouseTracking(True)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.nothing = text_label(self, role="secondary", wrap=True)
        self.loading_words = text_label(self, role="secondary", wrap=True)
        self.loading_bar = QProgressBar(self)
        self.loading_bar.setTextVisible(False)
        self.loading_bar.setAccessibleName(self.tr("Loading the model"))
        self.cancel_button = self._action(self.tr("Cancel loading"), self._cancel)
        self.load_button = self._action("", self._load_or_unload)
        self.default_button = self._action(self.tr("Set as default"), self._set_default)
        self.file_button = self._action(self.tr("Open a model file…"), self._open_file, kind="quiet")
        self.more_button = self._action(self.tr("Get more models…"), self._get_more, kind="quiet")
        self._lay_out()
        self._connect()

    def add_starter(self, offer: StarterOffer) -> None:
        self.column.insertWidget(self.column.indexOf(self.nothing) + 1, offer)
        offer.follow(self._library)

    # --- building ---

    def _action(self, text: str, do: Callable[[], object], *, kind: str = "") -> QPushButton:
        return push_button(self, text, do, kind=kind)

    def _lay_out(self) -> None:
        self._loading = QWidget(self)
        vbox(self.loading_words, hbox((self.loading_bar, 1), self.cancel_button, gap=12), into=self._loading, gap=4)
        actions = Flow(self.load_button, self.default_button, parent=self)
        line = QFrame(self)
        line.setProperty("line", "true")
        ways = Flow(self.file_button, self.more_button, parent=self, gap=4, ends_right=True)
        add_items(self.column, self._loading, self.filter, self.list, self.nothing, actions, line, ways)
        self.column.setContentsMargins(16, 14, 16, 10)

    def _connect(self) -> None:
        client = self._client
        self.filter.textChanged.connect(self._on_filter)
        self.list.doubleClicked.connect(self._load)
        self.list.selectionModel().currentChanged.connect(self._show_actions)
        self._models.dataChanged.connect(self._show_actions)
        self._library.listed.connect(self._on_listed)
        self._soon = timer(self, self._show, SOON_MS, once=True)
        self._speeds.found.connect(self._on_speed)
        self._settings.changed.connect(self._on_setting)
        for signal in (client.state_changed, client.loading_changed, client.model_loaded):
            signal.connect(self._on_engine)
        self._show_actions()
        keys = self.tr("Up, Down, Enter"), self.tr("Choose a model in the list, and load it")
        note_keys(self.filter, (keys,))

    # --- opening ---

    def set_chosen(self, model: str) -> None:
        """Who answers in the chat: `endpoint:NAME/MODEL`, or anything else for the model on this PC."""
        self._remote = model if is_remote(model) else ""
        if self.isVisible():
            self._show()

    def open_for(self, button: QWidget) -> None:
        if self.isVisible():
            self.close_and_return()
            return
        self._library.look()
        self._endpoints.look_again()
        self.filter.clear()
        self._show()
        self._on_engine()
        self.open_at(button)
        self.filter.setFocus()

    def _on_listed(self) -> None:
        if self.isVisible():
            self._show()
            rows = [row for row in self._models.rows if not row.remote]
            unknown = [row for row in rows if not (row.entry.measured_tokens_per_s or row.entry.problem)]
            self._speeds.ask([str(row.entry.path) for row in unknown])

    def _show(self) -> None:
        current = self.current
        model, entries = self._client.model, tuple(one for one in self._library.entries if not one.embeds)
        loaded = model.path if model is not None else ""
        default = self._settings.default_model
        self._models.show(
            with_opened(entries, model, default),  # the default is not loaded while another server answers
            loaded=loaded,
            default=default,
            predicted=self._predicted,
            elsewhere=self._elsewhere(),
        )
        self._select(current.key if current is not None else self._remote or loaded)

    def _elsewhere(self) -> tuple[ModelRow, ...]:
        from engine.checkpoint.library import LibraryEntry

        return tuple(
            ModelRow(
                LibraryEntry(model, Path(), origin="", context_tokens=context),
                is_loaded=remote_name(endpoint, model) == self._remote,
                is_default=remote_name(endpoint, model) == self._settings.chat_model,
                remote=remote_name(endpoint, model),
                place=sent_text(endpoint),
                heading="" if number else self.tr("Remote servers"),
            )
            for number, (endpoint, model, context) in enumerate(self._endpoints.models())
        )

    # --- the list ---

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange and not self.isHidden():
            self.list.doItemsLayout()
            self._fit()

    def _on_filter(self, text: str) -> None:
        self.rows.find(text)
        self._select("")

    def _fit(self) -> None:
        shown, everything = self.rows.rowCount(), len(self._models.rows)
        height = sum(self.list.sizeHintForRow(row) for row in range(min(shown, MOST_ROWS)))
        self.list.setFixedHeight(height)  # to the pixel: the next row begins where it ends
        self.list.setVisible(shown > 0)
        self.nothing.setVisible(shown == 0)
        looking = self.tr("No model is on this PC yet.") if self._library.was_listed else self.tr("Looking for models…")
        self.nothing.setText(self.tr("No model has that name.") if everything else looking)
        self.least_width = scaled(WIDTH_PX)

    def _select(self, path: str) -> None:
        self._fit()
        at = self.rows.mapFromSource(self._models.index(self._models.row_of(path), 0))
        self.list.setCurrentIndex(at if at.isValid() else self.rows.index(0, 0))
        self._show_actions()

    @property
    def current(self) -> ModelRow | None:
        row = self.list.currentIndex().data(ROW_ROLE)
        return row if isinstance(row, ModelRow) else None

    def _on_speed(self, path: str, tokens_per_s: float) -> None:
        self._predicted[path] = tokens_per_s
        if self.isVisible() and not self._soon.isActive():  # many at once, if they were known
            self._soon.start()

    def _on_setting(self, key: str) -> None:
        if key in ("default_model", "chat_model") and self.isVisible():
            self._show()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        is_ours = watched in (self.filter, self.list)
        if is_ours and isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
            if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
                self._load()
                return True
            if watched is self.filter and event.key() in (Qt.Key.Key_Up, Qt.Key.Key_Down):
                QApplication.sendEvent(self.list, event)
                return True
        return super().eventFilter(watched, event)

    # --- the engine ---

    def _on_engine(self) -> None:
        loading = self._client.state is EngineState.LOADING
        self._loading.setVisible(loading)
        share = self._client.loading
        self.loading_words.setText(loading_words(self._client.loading_pace))
        self.loading_bar.setRange(0, 0 if share is None else 100)
        self.loading_bar.setValue(0 if share is None else round(100 * share))
        model = self._client.model
        loaded = {str(row.entry.path) for row in self._models.rows if row.is_loaded and not row.remote}
        if self.isVisible() and loaded != ({model.path} if model is not None else set()):
            self._show()

    def _show_actions(self) -> None:
        row = self.current
        is_usable = row is not None and not row.entry.problem
        is_elsewhere = row is not None and bool(row.remote)
        unloads = row is not None and row.is_loaded and not is_elsewhere and not self._remote
        if is_elsewhere or (row is not None and row.is_loaded and not unloads):
            words = self.tr("Use in this chat")
        else:
            words = self.tr("Unload") if unloads else self.tr("Load")
        self.load_button.setText(words)
        self.load_button.setToolTip(self.tr("Frees the memory that the model takes") if unloads else "")
        self.load_button.setEnabled(is_usable and not (is_elsewhere and row is not None and row.is_loaded))
        self.default_button.setEnabled(is_usable and row is not None and not self._is_usual(row))
        self.default_button.setText(self.tr("Use in new chats") if is_elsewhere else self.tr("Set as default"))
        self.default_button.setToolTip(
            self.tr("New chats begin with it; chats that are there stay as they are")
            if is_elsewhere
            else self.tr("Loaded whenever Switchyard starts")
        )

    def _is_usual(self, row: ModelRow) -> bool:
        """Whether new chats are answered by it already."""
        return row.is_default and (bool(row.remote) or not self._settings.chat_model)

    def _load(self) -> None:
        row = self.current
        if row is not None and not row.entry.problem:
            self.hide()
            self.chosen.emit(row.remote)
            if not row.is_loaded and not row.remote:
                self.load_wanted.emit(str(row.entry.path))

    def _load_or_unload(self) -> None:
        row = self.current
        if row is not None and row.is_loaded and not row.remote and not self._remote:
            self.unload_wanted.emit()
        else:
            self._load()

    def _cancel(self) -> None:
        self.cancel_wanted.emit()
        self.filter.setFocus()  # the button goes away

    def _set_default(self) -> None:
        row = self.current
        if row is not None:
            self._settings.chat_model = row.remote
            is_known = row.entry in self._library.entries
            if not row.remote:
                self._settings.default_model = row.entry.name if is_known else str(row.entry.path)
            self.list.setFocus()  # the button is disabled now

    def _open_file(self) -> None:
        self.hide()
        self.file_wanted.emit()

    def _get_more(self) -> None:
        self.hide()
        self.more_wanted.emit()


class FoundModels(QSortFilterProxyModel):
    """The models whose name or precision has every word that is looked for."""

    def find(self, text: str) -> None:
        self._words = text.casefold().split()
        self.invalidate()

    def filterAcceptsRow(self, row: int, _parent: QModelIndex | QPersistentModelIndex) -> bool:
        found: ModelRow = self.sourceModel().index(row, 0).data(ROW_ROLE)
        text = f"{found.entry.name} {found.entry.precision_words} {found.place}".casefold()
        return all(word in text for word in self._words)

    _words: Sequence[str] = ()
