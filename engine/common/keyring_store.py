"""Secrets in the system's keyring, where there is one."""

from __future__ import annotations

from engine.common.falls import passed_over

_SERVICE = "Switchyard"


def ask_keyring(name: str) -> str:
    """What is kept under this name, or an empty string.  May wait for people who unlock it."""
    with passed_over("The keyring was not read"):  # there is none, it is locked, or no session to ask in
        import keyring

        return keyring.get_password(_SERVICE, name) or ""
    return ""


def tell_keyring(name: str, secret: str) -> None:
    """Keeps a secret, if there is a keyring: ask to know."""
    with passed_over("The keyring keeps nothing"):  # what its backends raise is not documented
        import keyring

        keyring.set_password(_SERVICE, name, secret)


def forget_in_keyring(name: str) -> None:
    with passed_over("The keyring forgets nothing"):
        import keyring

        keyring.delete_password(_SERVICE, name)
