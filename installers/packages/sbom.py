"""What a package consists of, in CycloneDX's form (1.6), which scanners for known faults read."""

from __future__ import annotations

import json
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packages.project import Project, name_of


def write_sbom(root: Path, project: Project) -> Path:
    """Writes `sbom.json` into a program's folder: libraries, Python and uv, with versions and licences.

    What the engine's part adds is in its locked list.
    """
    parser = HeaderParser()
    components: list[dict[str, Any]] = []
    for metadata in sorted((root / "window").glob("*.dist-info/METADATA")):
        said = parser.parsestr(metadata.read_text(encoding="utf-8", errors="replace"))
        components.append(_component(said["Name"], said["Version"], said["License-Expression"] or said["License"]))
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": "switchyard",
                "version": project.version,
                "licenses": [{"expression": project.license}],
            }
        },
        "components": [*components, *_programs(root)],
    }
    target = root / "sbom.json"
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return target


def _component(name: str, version: str, licence: str | None) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name_of(name)}@{version}",
    }
    if licence and len(licence) < 100 and "\n" not in licence:
        component["licenses"] = [{"license": {"name": licence}}]
    return component


def _programs(root: Path) -> list[dict[str, Any]]:
    libraries = sorted(root.glob("python/lib/python3.*")) + sorted(root.glob("python/python3[0-9]*.zip"))
    version = libraries[0].stem.removeprefix("python") if libraries[0].suffix == ".zip" else libraries[0].name[6:]
    return [
        {"type": "application", "name": "python", "version": version, "licenses": [{"license": {"id": "PSF-2.0"}}]},
        {"type": "application", "name": "uv", "licenses": [{"expression": "MIT OR Apache-2.0"}]},
    ]
