"""The window around the pages."""

from app.views.main_window.window import SIZE, SMALLEST, MainWindow

__all__ = ["SIZE", "SMALLEST", "MainWindow"]
