"""A strict reading of the trace event format (Google's "Trace Event Format", the JSON object form)."""

from typing import Any

_FIELDS = {
    "M": {"name", "ph", "pid", "tid", "args"},
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "b": {"name", "cat", "ph", "ts", "pid", "tid", "id", "args"},
    "e": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "i": {"name", "ph", "ts", "pid", "tid", "s"},
    "C": {"name", "ph", "ts", "pid", "tid", "args"},
}
_NAMES = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def check_trace(document: dict[str, Any]) -> None:
    """Raises AssertionError unless a viewer's importer takes all of it as it is meant."""
    assert set(document) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    assert isinstance(events, list)
    for event in events:
        assert set(event) == _FIELDS[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        assert event["name"]
        if "ts" in event:
            assert isinstance(event["ts"], int | float)
            assert event["ts"] >= 0
        if event["ph"] == "M":
            assert set(event["args"]) == {_NAMES[event["name"]]}
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    _check_nesting([event for event in events if event["ph"] == "X"])
    _check_pairs(events)
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in events if event["ph"] in "Xbei"} <= named


def _check_nesting(events: list[dict[str, Any]]) -> None:
    tracks: dict[int, list[tuple[int, int]]] = {}
    for event in events:
        begin = round(event["ts"] * 1000)  # nanoseconds, as importers keep them
        assert event["dur"] >= 0
        tracks.setdefault(event["tid"], []).append((begin, begin + round(event["dur"] * 1000)))
    for track in tracks.values():
        enclosing: list[int] = []
        for begin, end in sorted(track, key=lambda span: (span[0], -span[1])):
            while enclosing and enclosing[-1] <= begin:
                enclosing.pop()
            assert not enclosing or end <= enclosing[-1], "spans of one track overlap without one being in the other"
            enclosing.append(end)


def _check_pairs(events: list[dict[str, Any]]) -> None:
    begun: dict[tuple[str, str], dict[str, Any]] = {}
    for event in events:
        if event["ph"] not in "be":
            continue
        key = event["cat"], event["id"]
        if event["ph"] == "b":
            assert key not in begun
            begun[key] = event
        else:
            begin = begun.pop(key)
            assert begin["ts"] <= event["ts"]
            assert begin["name"] == event["name"]
    assert not begun
