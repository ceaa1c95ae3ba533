"""Remembers in memory what a job wrote, as its journal does on disk."""

from collections.abc import Sequence

from engine.batch_files.journal import WrittenFile


class Remembered:
    """A `Ledger`."""

    def __init__(self) -> None:
        self.files: list[WrittenFile] = []

    def written(self) -> Sequence[WrittenFile]:
        return self.files

    def remember(self, file: WrittenFile) -> None:
        self.files = [*self.files, file]

    def keep_only(self, files: Sequence[WrittenFile]) -> None:
        self.files = list(files)
