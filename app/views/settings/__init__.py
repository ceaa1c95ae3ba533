"""The Settings page: one card for each subject."""

from app.views.settings.page import SettingsPage

__all__ = ["SettingsPage"]
