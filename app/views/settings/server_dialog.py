"""The dialog for a server elsewhere: its address is tested before it is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, Qt
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QGridLayout,
    QHBoxLayout,
    QLayoutItem,
    QLineEdit,
    QMessageBox,
    QWidget,
)

from app.services.endpoints import Endpoints
from app.theme import scaled, set_look
from app.views.settings.server_words import found_text
from app.widgets.asking import ask, ask_path
from app.widgets.fields import ComboBox, DoubleSpinBox, SpinBox
from app.widgets.quantities import number
from app.widgets.scaffold import (
    hbox,
    line_edit,
    muted_label,
    push_button,
    scroll_area,
    set_message,
    text_label,
    vbox,
    warning_label,
)
from engine.common.errors import EngineError
from engine.remote.endpoint import Endpoint, Found, endpoint_at
from engine.remote.failures import RemoteError, Trouble

if TYPE_CHECKING:
    from engine.remote.capabilities import About

WIDTH_PX = 560
_MOST = 10**7
_ALWAYS_SHOWN = 3
"""Address, name and key are all that most servers need; the others are folded away."""


class ServerDialog(QDialog):
    """Keeps what it was given once a test has gone well; `endpoint` is the one to change, None for a new one."""

    def __init__(self, endpoints: Endpoints, endpoint: Endpoint | None, parent: QWidget) -> None:
        super().__init__(parent)
        self._endpoints, self._old = endpoints, endpoint
        self._found: Found | None = None
        self._tested: Endpoint | None = None
        self.setWindowTitle(self.tr("Add a server") if endpoint is None else endpoint.name)
        self.address = self._line(self.tr("Address"), "http://10.0.0.5:8000/v1")
        self.name = self._line(self.tr("Name"), self.tr("same as its host"))
        self.key = self._line(self.tr("Key"), self.tr("none") if endpoint is None else self.tr("as it is kept"))
        self.key.setEchoMode(QLineEdit.EchoMode.Password)
        self.certificate = self._line(self.tr("Certificate"), self.tr("those that the system trusts"))
        self.choose = push_button(
            self, self.tr("Choose…"), self._choose_certificate, name=self.tr("Choose a certificate's file")
        )
        self.model = ComboBox(self, name=self.tr("Model"))
        self.at_once = self._limit(self.tr("Requests at once"), self.tr("as measured"))
        self.requests = self._limit(self.tr("Requests a minute"), self.tr("no limit"))
        self.tokens = self._limit(self.tr("Tokens a minute"), self.tr("no limit"))
        self.price_in = self._price(self.tr("Price of a million tokens read"))
        self.price_out = self._price(self.tr("Price of a million tokens written"))
        self.currency = self._line(self.tr("Currency"), "€")
        self.currency.setFixedWidth(scaled(70))
        self.more = push_button(self, kind="fold", checkable=True)
        self._folded: list[QWidget] = []
        self.said = muted_label(self)
        self.trouble = warning_label(self)
        self.trust = push_button(self, self.tr("Trust its certificate…"), self._ask_for_certificate)
        self.trust.hide()
        self.buttons = QDialogButtonBox(self)
        self.test = self.buttons.addButton(self.tr("Test"), QDialogButtonBox.ButtonRole.ActionRole)
        self.save = self.buttons.addButton(self.tr("Save"), QDialogButtonBox.ButtonRole.AcceptRole)
        set_look(self.save, "kind", "primary")
        self.buttons.addButton(self.tr("Cancel"), QDialogButtonBox.ButtonRole.RejectRole)
        self._fill(endpoint)
        self._lay_out()
        self.more.toggled.connect(self._show_more)
        self.test.clicked.connect(self._test)
        self.buttons.accepted.connect(self._save)
        self.buttons.rejected.connect(self.reject)
        self.finished.connect(self._on_finished)
        for field in (self.address, self.key, self.certificate):
            field.textChanged.connect(self._show_state)
        self._show_state()
        self.address.setFocus()

    # --- building ---

    def _line(self, name: str, placeholder: str) -> QLineEdit:
        line = line_edit(self, name, hint=placeholder)
        return line

    def _limit(self, name: str, none: str) -> SpinBox:
        box = SpinBox(self)
        box.lineEdit().setTextMargins(8, 0, 0, 0)
        box.setRange(0, _MOST)
        box.setGroupSeparatorShown(True)
        box.setSpecialValueText(none)
        box.setAccessibleName(name)
        return box

    def _price(self, name: str) -> DoubleSpinBox:
        box = DoubleSpinBox(self)
        box.lineEdit().setTextMargins(8, 0, 0, 0)
        box.setRange(0, 1e6)
        box.setDecimals(3)
        box.setSingleStep(0.1)
        box.setSpecialValueText(self.tr("price not known"))
        box.setAccessibleName(name)
        return box

    def _fill(self, endpoint: Endpoint | None) -> None:
        self._offer((), "")
        if endpoint is None:
            return
        self.address.setText(endpoint.url)
        self.name.setText(endpoint.name)
        self.certificate.setText(endpoint.ca_file)
        self._offer(endpoint.found.models, endpoint.model)
        self.at_once.setValue(endpoint.at_once or 0)
        self.requests.setValue(endpoint.requests_per_minute or 0)
        self.tokens.setValue(endpoint.tokens_per_minute or 0)
        self.price_in.setValue(endpoint.price_in or 0.0)
        self.price_out.setValue(endpoint.price_out or 0.0)
        self.currency.setText(endpoint.currency)
        plain = Endpoint(endpoint.name, endpoint.url, found=endpoint.found)
        self.more.setChecked(endpoint != plain)

    def _offer(self, models: tuple[str, ...], chosen: str) -> None:
        """These models, of which one is chosen, or none."""
        self.model.clear()
        self.model.addItem(self.tr("Chosen in each chat"), "")
        for model in dict.fromkeys((*models, *filter(None, (chosen,)))):
            self.model.addItem(model, model)
        self.model.setCurrentIndex(self.model.findData(chosen))

    def _lay_out(self) -> None:
        self._form = inside = QWidget(self)
        form = QGridLayout(inside)
        form.setContentsMargins(20, 18, 20, 4)
        form.setHorizontalSpacing(16)
        form.setVerticalSpacing(8)
        form.setColumnStretch(1, 1)
        certificate = hbox(gap=-1)
        prices = hbox(gap=-1)
        for layout, widgets in (
            (certificate, (self.certificate, self.choose)),
            (prices, (self.price_out, self.currency)),
        ):
            layout.setSpacing(8)
            layout.addWidget(widgets[0], 1)
            layout.addWidget(widgets[1])
        fields: tuple[tuple[str, QWidget | QHBoxLayout, QWidget], ...] = (
            (self.tr("Address"), self.address, self.address),
            (self.tr("Name"), self.name, self.name),
            (self.tr("Key"), self.key, self.key),
            (self.tr("Certificate"), certificate, self.certificate),
            (self.tr("Model"), self.model, self.model),
            (self.tr("Requests at once"), self.at_once, self.at_once),
            (self.tr("Requests a minute"), self.requests, self.requests),
            (self.tr("Tokens a minute"), self.tokens, self.tokens),
            (self.tr("Per million tokens read"), self.price_in, self.price_in),
            (self.tr("Per million tokens written"), prices, self.price_out),
        )
        for at, (name, field, buddy) in enumerate(fields):
            row = at + (at >= _ALWAYS_SHOWN)  # the fold's button stands before those that it shows
            label = text_label(self, name, buddy=buddy)
            form.addWidget(label, row, 0)
            if isinstance(field, QWidget):
                form.addWidget(field, row, 1)
            else:
                form.addLayout(field, row, 1)
            if at >= _ALWAYS_SHOWN:
                inner = [field] if isinstance(field, QWidget) else [item.widget() for item in _items(field)]
                self._folded += [label, *inner]
        form.addWidget(self.more, _ALWAYS_SHOWN, 0, 1, 2, Qt.AlignmentFlag.AlignLeft)
        form.setRowStretch(len(fields) + 1, 1)
        self._area = scroll_area(inside, self)
        self._below = below = vbox(self.said, self.trouble, self.trust, self.buttons, margins=(20, 8, 20, 18), gap=12)
        vbox((self._area, 1), below, into=self, gap=0)
        set_message(self.trouble, "")
        self._show_more(self.more.isChecked())

    def _show_more(self, shown: bool) -> None:
        for widget in self._folded:
            widget.setVisible(shown)
        self.more.setText(self.tr("Less") if shown else self.tr("More: certificate, model, limits and prices"))
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange and self.layout() is not None:
            self._fit()

    def _fit(self) -> None:
        """As high as its words need at its width, but no higher than the window: the form scrolls."""
        width = scaled(WIDTH_PX)
        self._area.setMinimumWidth(self._form.minimumSizeHint().width())
        below = max(self._below.totalHeightForWidth(width), self._below.totalSizeHint().height())
        high = self._form.sizeHint().height() + below + scaled(24)
        over = self.parentWidget()
        room = over.window().height() - scaled(20) if over is not None else high
        self.resize(width, min(high, max(scaled(360), room)))

    # --- what was entered ---

    def _entered(self) -> Endpoint:
        """Raises EngineError: it makes no sense."""
        return endpoint_at(
            self.address.text(),
            self.name.text(),
            model=self.model.currentData(),
            at_once=self.at_once.value() or None,
            requests_per_minute=self.requests.value() or None,
            tokens_per_minute=self.tokens.value() or None,
            price_in=self.price_in.value() or None,
            price_out=self.price_out.value() or None,
            currency=self.currency.text().strip()[:8],
            ca_file=self.certificate.text().strip(),
        )

    def _key(self) -> str | None:
        """A new key; None for the one that is kept."""
        return self.key.text().strip() or None

    def _place(self) -> tuple[str, str, str]:
        return self.address.text().strip(), self.key.text().strip(), self.certificate.text().strip()

    def _show_state(self) -> None:
        """It can be kept if what was tested is still what stands there."""
        is_tested = self._found is not None and self._place() == self._tested_place
        self.save.setEnabled(is_tested)
        self.test.setEnabled(bool(self.address.text().strip()))
        self.test.setDefault(not is_tested)
        self.save.setDefault(is_tested)
        if not is_tested:
            self.said.setText(
                self.tr(
                    "It is tested before it is kept: that asks a model for a few tokens. The key is kept in the "
                    "system's keyring, or for this run only where there is none."
                )
            )

    _tested_place = ("", "", "")

    # --- testing and keeping ---

    def _test(self) -> None:
        set_message(self.trouble, "")
        self.trust.hide()
        self._found = None
        self._show_state()
        try:
            endpoint = self._entered()
        except EngineError as error:
            self._on_failed(error)
            return
        self._tested_place = self._place()
        self.said.setText(self.tr("Asking {0}…").format(endpoint.host))
        self.test.setEnabled(False)
        self._endpoints.test(endpoint, self._key(), self.show_seen, self._on_failed)

    def show_seen(self, seen: About) -> None:
        """What a test has found, which can be kept now."""
        self.test.setEnabled(True)
        self._found, self._tested_place = seen.found, self._place()
        self._offer(seen.found.models, self.model.currentData())
        self._show_state()
        times = self.tr("It answers in {0} ms.").format(number(1000 * seen.latency_s, 0))
        if seen.first_token_s is not None:
            words = self.tr("It answers in {0} ms; the first token came after {1} s.")
            times = words.format(number(1000 * seen.latency_s, 0), number(seen.first_token_s, 2))
        elif not seen.problem:
            times += " " + self.tr("Choose a model and test again to see what it can do.")
        self.said.setText(f"{found_text(seen.found)}\n{times}")
        set_message(self.trouble, seen.problem)
        self._lead_to(self.save)
        self._fit()

    def _on_failed(self, error: Exception) -> None:
        self.test.setEnabled(True)
        self._found = None
        self._show_state()
        self._lead_to(self.address)
        if not isinstance(error, EngineError):
            raise error
        self.said.setText("")
        set_message(self.trouble, error.message)
        self.trust.setVisible(isinstance(error, RemoteError) and error.kind is Trouble.CERTIFICATE)
        self._fit()

    def _lead_to(self, widget: QWidget) -> None:
        """Where to go on after a test: while it ran Cancel had the focus, and Enter would lose all that was entered."""
        if self.focusWidget() in self.buttons.buttons():
            widget.setFocus()

    def _ask_for_certificate(self) -> None:
        endpoint = self._entered()
        self.trust.setEnabled(False)
        self._endpoints.offered(endpoint, lambda offered: self.show_offered(endpoint, *offered), self._on_not_offered)

    def show_offered(self, endpoint: Endpoint, pem: bytes, fingerprint: str) -> None:
        """Asks whether this is the certificate of the right server."""
        self.trust.setEnabled(True)
        details = self.tr(
            "Its fingerprint (SHA-256) is\n{0}\nCompare it with what that server shows: “switchyard serve --https” "
            "prints it. Only this certificate is trusted for this server then."
        ).format(fingerprint)

        def trust() -> None:
            self._endpoints.trust(endpoint, pem, self._on_trusted, self._on_failed)

        question = self.tr("Trust the certificate of {0}?").format(endpoint.host)
        self.question = ask(self, question, details, [(self.tr("Trust it"), "do", trust)])

    question: QMessageBox | None = None
    """The last that was asked."""

    def _on_trusted(self, file: str) -> None:
        self.certificate.setText(file)
        self._test()

    def _on_not_offered(self, error: Exception) -> None:
        self.trust.setEnabled(True)
        self._on_failed(error)

    def _save(self) -> None:
        try:
            endpoint = replace(self._entered(), found=self._found or Found())
        except EngineError as error:
            set_message(self.trouble, error.message)
            return
        old = self._old.name if self._old is not None else ""
        self.save.setEnabled(False)
        self._endpoints.keep(endpoint, self._key(), old, lambda _stays: self.accept(), self._on_not_kept)

    def _on_not_kept(self, error: Exception) -> None:
        self._show_state()
        if not isinstance(error, EngineError):
            raise error
        set_message(self.trouble, error.message)
        self._fit()

    def _choose_certificate(self) -> None:
        kinds = self.tr("Certificates (*.pem *.crt *.cer)")
        ask_path(
            self, self.tr("The server's certificate"), lambda path: self.certificate.setText(str(path)), kinds=kinds
        )

    def _on_finished(self) -> None:
        self._endpoints.stop_testing()
        self.key.clear()
        self.deleteLater()


def _items(layout: QHBoxLayout) -> list[QLayoutItem]:
    return [item for at in range(layout.count()) if (item := layout.itemAt(at)) is not None]
