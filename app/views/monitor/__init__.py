"""The Monitor page: what the machine and the engine did, and what the expert cache holds."""

from app.views.monitor.page import MonitorPage

__all__ = ["MonitorPage"]
