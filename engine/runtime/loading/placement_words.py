"""What was decided otherwise than it was wished, in sentences for people."""

from __future__ import annotations

from engine.common.sizes import rounded_down, rounded_up
from engine.planner.placement import Note, NoteCode


def sentence(note: Note) -> str:
    """The note with its figures."""
    needed, room = rounded_up(note.needed), rounded_down(note.room)
    if note.code is NoteCode.ON_CPU:
        return (
            f"Runs on the CPU: even without its experts the model needs {needed} of {note.device}, of which {room} can "
            "be used."
        )
    begin = f"Weights are in {note.precision}, because {note.instead_of} needs {needed}"
    if note.code is NoteCode.COARSER_FOR_DEVICE:
        return f"{begin} of {note.device} even without its experts, of which {room} can be used."
    return f"{begin} of RAM and there is room for {room}."
