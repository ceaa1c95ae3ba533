"""What a job was when it began: a resume that would mix two different jobs is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from engine.errors import EngineError, ErrorCode

VERSION = 1

_SHOWN = {
    "input_hash": "the input file",
    "template": "the template",
    "system": "the system prompt",
    "model": "the model",
    "precision": "the precision",
    "sampling": "the sampling",
    "constraint": "what the answers must be",
    "form": "how the input is read",
    "version": "the version of Switchyard",
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that the answers depend on, as text; equal manifests give the same answers.

    Attributes:
        input_hash: see `fingerprint.content_hash`.
        template, system: of the prompts; empty where rows bring their own.
        model: the model's fingerprint.
        precision: of its weights.
        sampling, constraint, form: as JSON.
    """

    input_hash: str
    template: str
    system: str
    model: str
    precision: str
    sampling: str
    constraint: str
    form: str
    version: int = VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


def parse_manifest(text: str) -> Manifest | None:
    """A manifest as `to_json` wrote it; None if it is of another version or no manifest at all."""
    try:
        values = json.loads(text)
        manifest = Manifest(**values)
    except (ValueError, TypeError):
        return None
    return manifest if manifest.version == VERSION else None


def require_same(begun: Manifest | None, now: Manifest) -> None:
    """Refuses to go on with another job's answers.

    Raises:
        EngineError: `INVALID_REQUEST`, naming what differs.
    """
    names = [field.name for field in fields(Manifest)]
    differing = [name for name in names if begun is None or getattr(begun, name) != getattr(now, name)]
    if differing:
        what = " and ".join(_SHOWN[name] for name in differing) if begun is not None else _SHOWN["version"]
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"The job with this output was begun when {what} differed: name another output, or restart it, which "
            f"discards the answers that it has.",
        )
