"""The hub's address: a mirror's if the settings name one and the environment does not."""

from __future__ import annotations

import os

from PySide6.QtCore import QCoreApplication, QUrl

from app.services.settings import Settings

translate = QCoreApplication.translate

HUB_ADDRESS_KEY = "hub_address"
_VARIABLE = "SWITCHYARD_HUB"
"""What `endpoint_of` reads; processes that the window starts inherit it."""


def use_hub_address(settings: Settings) -> None:
    """Asks the hub at the address of the settings from now on; a damaged one counts as none."""
    address = settings.get(HUB_ADDRESS_KEY, "")
    if address and not address_problem(address):
        os.environ[_VARIABLE] = address
    else:
        os.environ.pop(_VARIABLE, None)


def address_of_environment() -> str:
    """What the user's own environment says, which wins; empty for nothing."""
    return os.environ.get("HF_ENDPOINT", "")


def address_problem(address: str) -> str:
    """Why this cannot be a hub's address, in a sentence; empty if it can.

    Tokens and models go through it: without encryption only to this machine.
    """
    url = QUrl(address, QUrl.ParsingMode.StrictMode)
    is_here = url.scheme() == "http" and url.host() in ("localhost", "127.0.0.1", "::1")
    is_plain = not (url.userInfo() or url.hasQuery() or url.hasFragment())
    if url.isValid() and url.host() and is_plain and (url.scheme() == "https" or is_here):
        return ""
    return translate("HubAddress", "This is not a mirror's address: give one such as https://mirror.example.")
