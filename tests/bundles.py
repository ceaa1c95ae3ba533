"""Made-up bundles: what a package installs, with this Python and no programs."""

import base64
import hashlib
import json
import sys
import zipfile
from collections.abc import Sequence
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


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str | bytes], tag: str = "py3-none-any") -> Path:
    """A wheel of these files."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    about = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
    whole: dict[str, str | bytes] = {**files, f"{info}/METADATA": metadata, f"{info}/WHEEL": about}
    rows = []
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as packed:
        for place, content in whole.items():
            data = content.encode() if isinstance(content, str) else content
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{place},sha256={digest},{len(data)}")
            packed.writestr(place, data)
        packed.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return path


SELF_TEST = """
import json, os, torch
found = {"problem": os.environ.get("SELF_TEST_PROBLEM", ""), "torch": torch.VERSION}
print(json.dumps(found))
raise SystemExit(1 if found["problem"] else 0)
"""


def make_own_wheels(root: Path, version: str) -> None:
    """Our own wheels of a bundle: an engine that does nothing but test itself."""
    files = {
        "engine/__init__.py": f"VERSION = {version!r}\n",
        "engine/self_test.py": SELF_TEST,
    }
    make_wheel(root / "wheels", "switchyard_engine", version, dict(files))
    make_wheel(root / "wheels", "switchyard_app", version, {"app/__init__.py": ""})


def make_lock(root: Path, wheels: Sequence[Path], address: str, build: str = "cpu") -> None:
    """The list of a bundle's engine: these wheels, at `address/FILE`."""
    listed = {}
    for path in wheels:
        name, version, *_ = path.name.split("-")
        data = path.read_bytes()
        url = f"{address}/{path.name}"
        sha256 = hashlib.sha256(data).hexdigest()
        listed[path.name] = {"name": name, "version": version, "url": url, "sha256": sha256, "bytes": len(data)}
    place = {"platform": PLATFORM, "python": installed.this_python(), "build": build}
    text = {"format": 1, "torch": "1", "wheels": listed, "lists": [{**place, "files": sorted(listed)}]}
    (root / "engine-lock.json").write_text(json.dumps(text), encoding="utf-8")
