"""Servers elsewhere: their card, and the dialog in which an address is tested before it is kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from PySide6.QtCore import QCoreApplication, Qt, QTimer
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import (
    QMessageBox,
    QScrollArea,
    QWidget,
)

from app.services.background import sentence_of
from app.services.endpoints import Endpoints
from app.theme import scaled
from app.views.settings.card import Row, SettingsCard
from app.widgets.asking import ask, ask_path
from app.widgets.fields import ComboBox, DoubleSpinBox, SpinBox
from app.widgets.quantities import SEPARATOR, count, number
from app.widgets.scaffold import FormDialog, line_edit, muted_label, push_button, set_message, vbox, warning_label
from engine.common.errors import EngineError
from engine.remote.endpoint import Endpoint, Found, Lack, Server, called, endpoint_at
from engine.remote.failures import RemoteError, Trouble

if TYPE_CHECKING:
    from engine.remote.capabilities import About
    from engine.remote.nearby import Nearby


translate = QCoreApplication.translate


SERVERS: dict[Server, str] = {
    "switchyard": "Switchyard",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
    "llama-cpp-python": "llama-cpp-python",
    "ollama": "Ollama",
    "openai": "OpenAI",
}
_MOST_NAMED = 4


def found_text(found: Found) -> str:
    if not found.server:
        return translate("Servers", "Not tested yet.")
    server = SERVERS.get(found.server, translate("Servers", "A server with OpenAI's interface"))
    models = ", ".join(found.models[:_MOST_NAMED]) or translate("Servers", "no model")
    if len(found.models) > _MOST_NAMED:
        models = translate("Servers", "{0} and {1} more").format(models, count(len(found.models) - _MOST_NAMED))
    lines = [SEPARATOR.join((f"{server} {found.version}".strip(), models))]
    if found.lacks:
        *others, last = map(lack_text, found.lacks)
        either = translate("Servers", "{0} or {1}").format(", ".join(others), last) if others else last
        lines.append(translate("Servers", "It cannot {0}.").format(either))
    if found.blind:
        named = ", ".join(found.blind[:_MOST_NAMED])
        if len(found.blind) > _MOST_NAMED:
            named = translate("Servers", "{0} and {1} more").format(named, count(len(found.blind) - _MOST_NAMED))
        words = translate("Servers", "Models that read text only, no pictures: {0}.").format(named)
        lines.append(words if len(found.models) > 1 else translate("Servers", "It reads text only, no pictures."))
    return "\n".join(lines)


def lack_text(lack: Lack) -> str:
    """What a server cannot do, to go on a sentence that says so."""
    return {
        "stream": translate("Servers", "send answers as they are written"),
        "usage": translate("Servers", "count tokens"),
        "tools": translate("Servers", "call tools"),
        "schema": translate("Servers", "keep to a schema"),
        "sampling": translate("Servers", "take top-k, min-p or a repetition penalty"),
    }[lack]


def money_text(endpoint: Endpoint) -> str:
    currency = f" {endpoint.currency}".rstrip()
    per_minute, at_once = endpoint.requests_per_minute, endpoint.at_once
    parts = [
        translate("Servers", "{0} at once").format(count(at_once)) if at_once else "",
        translate("Servers", "{0} requests a minute").format(count(per_minute)) if per_minute else "",
        translate("Servers", "{0} tokens a minute").format(count(endpoint.tokens_per_minute))
        if endpoint.tokens_per_minute
        else "",
        translate("Servers", "a million tokens read: {0}{1}").format(number(endpoint.price_in, 2), currency)
        if endpoint.price_in is not None
        else "",
        translate("Servers", "written: {0}{1}").format(number(endpoint.price_out, 2), currency)
        if endpoint.price_out is not None
        else "",
    ]
    return SEPARATOR.join(filter(None, parts))


_MOST = 10**7


class ServerDialog(FormDialog):
    """Keeps what it was given once a test has gone well; `endpoint` is the one to change, None for a new one."""

    def __init__(self, endpoints: Endpoints, endpoint: Endpoint | None, parent: QWidget) -> None:
        super().__init__("", translate("ServerDialog", "Save"), parent, tests=translate("ServerDialog", "Test"))
        self.setWindowTitle(self.tr("Add a server") if endpoint is None else endpoint.name)
        self._endpoints, self._old = endpoints, endpoint
        self._found: Found | None = None
        self.save = self.keep
        self.address = line_edit(self, self.tr("Address"), hint="http://10.0.0.5:8000/v1")
        self.name = line_edit(self, self.tr("Name"), hint=self.tr("same as its host"))
        kept = self.tr("none") if endpoint is None else self.tr("as it is kept")
        self.key = line_edit(self, self.tr("Key"), hint=kept, secret=True)
        self.more = push_button(self, kind="fold", checkable=True)
        self.certificate = line_edit(self, self.tr("Certificate"), hint=self.tr("those that the system trusts"))
        self.choose = push_button(
            self, self.tr("Choose…"), self._choose_certificate, name=self.tr("Choose a certificate's file")
        )
        self.model = ComboBox(self, name=self.tr("Model"))
        self.at_once = self._limit(self.tr("Requests at once"), self.tr("as measured"))
        self.requests = self._limit(self.tr("Requests a minute"), self.tr("no limit"))
        self.tokens = self._limit(self.tr("Tokens a minute"), self.tr("no limit"))
        self.price_in = self._price(self.tr("Price of a million tokens read"))
        self.price_out = self._price(self.tr("Price of a million tokens written"))
        self.currency = line_edit(self, self.tr("Currency"), hint="€")
        self.currency.setFixedWidth(scaled(70))
        self.trust = push_button(self, self.tr("Trust its certificate…"), self._ask_for_certificate)
        self.trust.hide()
        self.below.insertWidget(2, self.trust)
        self._fill(endpoint)
        for field in (self.address, self.name, self.key):
            self.add_field(field.accessibleName(), field)
        self.rows.addWidget(self.more, self.rows.rowCount(), 0, 1, 2, Qt.AlignmentFlag.AlignLeft)
        self._folded = [
            *self.add_field(self.tr("Certificate"), self.certificate, self.choose),
            *self.add_field(self.tr("Model"), self.model),
            *self.add_field(self.tr("Requests at once"), self.at_once),
            *self.add_field(self.tr("Requests a minute"), self.requests),
            *self.add_field(self.tr("Tokens a minute"), self.tokens),
            *self.add_field(self.tr("Per million tokens read"), self.price_in),
            *self.add_field(self.tr("Per million tokens written"), self.price_out, self.currency),
        ]
        self.rows.setRowStretch(self.rows.rowCount(), 1)
        set_message(self.trouble, "")
        self._show_more(self.more.isChecked())
        self.more.toggled.connect(self._show_more)
        self.test.clicked.connect(self._test)
        self.finished.connect(self._on_finished)
        for field in (self.address, self.key, self.certificate):
            field.textChanged.connect(self._show_state)
        self._show_state()
        self.address.setFocus()

    # --- building ---

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
        self.model.clear()
        self.model.addItem(self.tr("Chosen in each chat"), "")
        for model in dict.fromkeys((*models, *filter(None, (chosen,)))):
            self.model.addItem(model, model)
        self.model.setCurrentIndex(self.model.findData(chosen))

    def _show_more(self, shown: bool) -> None:
        for widget in self._folded:
            widget.setVisible(shown)
        self.more.setText(self.tr("Less") if shown else self.tr("More: certificate, model, limits and prices"))
        self.fit()

    # --- what was entered ---

    def _entered(self) -> Endpoint:
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
        return self.key.text().strip() or None

    def _place(self) -> tuple[str, str, str]:
        return self.address.text().strip(), self.key.text().strip(), self.certificate.text().strip()

    def _show_state(self) -> None:
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
        self.fit()

    def _on_failed(self, error: Exception) -> None:
        self.test.setEnabled(True)
        self._found = None
        self._show_state()
        self._lead_to(self.address)
        self.said.setText("")
        set_message(self.trouble, sentence_of(error))
        self.trust.setVisible(isinstance(error, RemoteError) and error.kind is Trouble.CERTIFICATE)
        self.fit()

    def _lead_to(self, widget: QWidget) -> None:
        """Where to go on after a test: while it ran Cancel had the focus, and Enter would lose all that was entered."""
        if self.focusWidget() in self.buttons.buttons():
            widget.setFocus()

    def _ask_for_certificate(self) -> None:
        endpoint = self._entered()
        self.trust.setEnabled(False)
        self._endpoints.offered(endpoint, lambda offered: self.show_offered(endpoint, *offered), self._on_not_offered)

    def show_offered(self, endpoint: Endpoint, pem: bytes, fingerprint: str) -> None:
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

    def _on_trusted(self, file: str) -> None:
        self.certificate.setText(file)
        self._test()

    def _on_not_offered(self, error: Exception) -> None:
        self.trust.setEnabled(True)
        self._on_failed(error)

    def kept(self) -> None:
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
        set_message(self.trouble, sentence_of(error))
        self.fit()

    def _choose_certificate(self) -> None:
        kinds = self.tr("Certificates (*.pem *.crt *.cer)")
        ask_path(
            self, self.tr("The server's certificate"), lambda path: self.certificate.setText(str(path)), kinds=kinds
        )

    def _on_finished(self) -> None:
        self._endpoints.stop_testing()
        self.key.clear()
        self.deleteLater()


class ServersCard(SettingsCard):
    def __init__(self, endpoints: Endpoints, parent: QWidget | None = None) -> None:
        super().__init__(translate("ServersCard", "Remote servers"), parent)
        self._endpoints = endpoints
        self.add = push_button(self, self.tr("Add…"), lambda: self.edit(None), name=self.tr("Add a server"))
        words = self.tr(
            "vLLM, SGLang, llama.cpp, Ollama, another Switchyard. Text goes to one only in chats and jobs where you "
            "choose it."
        )
        self.look = push_button(self, self.tr("Look on this network"), self._look_around)
        self.add_row(self.tr("Models that run elsewhere"), words, self.look, self.add)
        self._seen = muted_label(self)
        self.add_wide(self._seen)
        self._seen.hide()
        self.trouble = warning_label(self)
        self.add_wide(self.trouble)
        self.rows = QWidget(self)
        self._lines = vbox(into=self.rows, gap=12)
        self.add_wide(self.rows)
        self.dialog: ServerDialog | None = None
        endpoints.changed.connect(self._show)
        self._show()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._endpoints.look_again()

    def edit(self, endpoint: Endpoint | None, near: Nearby | None = None) -> None:
        self.dialog = ServerDialog(self._endpoints, endpoint, self.window())
        if near is not None:
            self.dialog.address.setText(near.url)
            self.dialog.name.setText(near.name)
        if endpoint is None:
            self.dialog.accepted.connect(self._show_new)
        self.dialog.open()

    def _show_new(self) -> None:
        area: QWidget | None = self
        while area is not None and not isinstance(area, QScrollArea):
            area = area.parentWidget()
        if area is not None:
            QTimer.singleShot(0, self.rows, partial(area.ensureWidgetVisible, self.rows))

    def _look_around(self) -> None:
        self.look.setEnabled(False)
        self._tell(self.tr("Looking…"))
        self._endpoints.look_around(self.show_near, self._on_not_looked)

    def show_near(self, found: tuple[Nearby, ...]) -> None:
        self.look.setEnabled(True)
        known = {endpoint.url for endpoint in self._endpoints.entries}
        self._near = tuple(each for each in found if each.url not in known)
        if not found:
            self._tell(
                self.tr(
                    "No Switchyard answered. One does if it was started with “switchyard serve --host 0.0.0.0 --https "
                    "--announce NAME” in this network."
                )
            )
        elif not self._near:
            self._tell(self.tr("All that answered are in the list."))
        else:
            self._tell("")
        self._show()

    def _tell(self, words: str) -> None:
        set_message(self._seen, words)

    def _on_not_looked(self, error: Exception) -> None:
        self.look.setEnabled(True)
        self._tell("")
        self._on_failed(error)

    _near: tuple[Nearby, ...] = ()

    def _show(self) -> None:
        set_message(self.trouble, self._endpoints.problem)
        while (item := self._lines.takeAt(0)) is not None:
            if (row := item.widget()) is not None:
                row.hide()
                row.deleteLater()
        for endpoint in self._endpoints.entries:
            self._lines.addWidget(self._row(endpoint))
        known = {endpoint.url for endpoint in self._endpoints.entries}
        near = [each for each in self._near if each.url not in known]
        for each in near:
            self._lines.addWidget(self._near_row(each))
        self.rows.setVisible(bool(self._endpoints.entries or near))

    def _near_row(self, near: Nearby) -> QWidget:
        add = push_button(
            self.rows, self.tr("Add…"), lambda: self.edit(None, near), name=self.tr("Add {0}").format(near.name)
        )
        return Row(near.name, self.tr("Found on this network · {0}").format(near.url), (add,), self.rows)

    def _row(self, endpoint: Endpoint) -> QWidget:
        words = "\n".join(filter(None, (found_text(endpoint.found), money_text(endpoint))))
        edit = push_button(
            self.rows, self.tr("Edit…"), lambda: self.edit(endpoint), name=self.tr("Edit {0}").format(endpoint.name)
        )
        remove = push_button(
            self.rows,
            self.tr("Remove"),
            lambda: self._ask_to_remove(endpoint),
            name=self.tr("Remove {0}").format(endpoint.name),
        )
        return Row(called(endpoint), words, (edit, remove), self.rows)

    def _ask_to_remove(self, endpoint: Endpoint) -> None:
        details = self.tr(
            "Its key is removed, too. Chats that were held with it stay; nothing else answers in them by itself."
        )
        remove = (self.tr("Remove"), "destroy", lambda: self._endpoints.remove(endpoint, self._on_failed))
        ask(self.window(), self.tr("Remove {0}?").format(endpoint.name), details, [remove])  # type: ignore[list-item]

    def _on_failed(self, error: Exception) -> None:
        set_message(self.trouble, sentence_of(error))
