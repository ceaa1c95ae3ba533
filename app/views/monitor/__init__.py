"""The Monitor page: what the machine and the engine did, and the contents of the expert cache."""

from app.views.monitor.page import MonitorPage

__all__ = ["MonitorPage"]
