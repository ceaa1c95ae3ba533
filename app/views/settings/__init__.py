"""The Settings page: one card per subject."""

from app.views.settings.page import SettingsPage

__all__ = ["SettingsPage"]
