"""Made-up bundles: what a package installs, with this Python and no programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine.common import installed
from engine.common.installed import Whole

PLATFORM = "linux-x86_64"


def make_bundle(root: Path, version: str = "0.2.0", **others: str) -> Path:
    """A bundle's folder; `others` replaces what `bundle.json` says."""
    root.mkdir(parents=True)
    said = {
        "format": 1,
        "version": version,
        "platform": PLATFORM,
        "python": sys.executable,
        "uv": "bin/uv",
        "window": "window",
        "wheels": "wheels",
        "engine_lock": "engine-lock.json",
        "packaged_as": "run",
    }
    for folder in ("window", "wheels", "bin"):
        (root / folder).mkdir()
    (root / "bundle.json").write_text(json.dumps(said | others), encoding="utf-8")
    return root


def make_part(folder_name: str, **others: str) -> Path:
    """A whole part; `others` replaces what its `whole.json` says."""
    folder = installed.parts_dir() / folder_name
    folder.mkdir(parents=True)
    _, version, *build = folder_name.split("-")
    said = {"platform": PLATFORM, "python": installed.this_python(), "build": "".join(build), "version": version}
    installed.write_whole_record(folder, Whole(**({"name": folder_name} | said | others)))
    return folder
