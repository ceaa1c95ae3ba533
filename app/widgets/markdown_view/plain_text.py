"""Segments as plain text, for the clipboard and for screen readers."""

from __future__ import annotations

from collections.abc import Iterable

from app.widgets.markdown_view.segments import CodeBlock, Gap, RuleBlock, Segment, TableBlock, TextBlock, TextSpan


def spans_text(spans: Iterable[TextSpan]) -> str:
    return "".join(span.text for span in spans)


def segment_text(segment: Segment) -> str:
    """One segment without its markup; list items keep their markers, table cells are separated by tabs."""
    if isinstance(segment, TextBlock):
        text = spans_text(segment.spans)
        depth = segment.containers.count("l")
        if segment.marker is None or not depth:
            return text
        return "  " * (depth - 1) + f"{segment.marker.text()} {text}"
    if isinstance(segment, CodeBlock):
        return segment.code
    if isinstance(segment, TableBlock):
        return "\n".join("\t".join(spans_text(cell) for cell in row) for row in segment.rows)
    assert isinstance(segment, RuleBlock)
    return "---"


def plain_text(segments: Iterable[Segment]) -> str:
    parts: list[str] = []
    for segment in segments:
        if parts:
            parts.append("\n" if segment.gap is Gap.ITEM else "\n\n")
        parts.append(segment_text(segment))
    return "".join(parts)
