"""What a job's answers depend on: a resume that would mix two different jobs is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from engine.common.errors import EngineError, ErrorCode

VERSION = 1

_SHOWN = {
    "input_hash": "another input",
    "template": "another template",
    "system": "another system prompt",
    "model": "another model",
    "precision": "weights in {0}, which are now in {1}",
    "sampling": "other sampling settings",
    "constraint": "another schema or other choices",
    "form": "another way to read the input",
    "version": "another version of Switchyard",
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that the answers depend on, as text; equal manifests give equal answers.

    Attributes:
        input_hash: see `fingerprint.content_hash`.
        template, system: of the prompts; empty if rows have their own.
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
        return json.dumps(asdict(self))


def parse_manifest(text: str) -> Manifest | None:
    """A manifest as `to_json` wrote it; None if it is from another version or invalid."""
    try:
        values = json.loads(text)
        manifest = Manifest(**values)
    except (ValueError, TypeError):
        return None
    return manifest if manifest.version == VERSION else None


def require_same(begun: Manifest | None, now: Manifest, answers: int) -> None:
    """Refuses to continue with another job's answers.

    Args:
        answers: number of existing answers.

    Raises:
        EngineError: `INVALID_REQUEST`, naming what differs.
    """
    names = [field.name for field in fields(Manifest)]
    differing = [name for name in names if begun is None or getattr(begun, name) != getattr(now, name)]
    if differing:
        if begun is None:
            what = _SHOWN["version"]
        else:
            what = " and ".join(_SHOWN[name].format(getattr(begun, name), getattr(now, name)) for name in differing)
        whose = "1 answer of this job was" if answers == 1 else f"{answers:,} answers of this job were"
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"The {whose} made with {what}: go back to that, choose another output, or start over, which "
            f"discards its answers.",
        )
