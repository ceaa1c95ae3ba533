"""The package for macOS: Switchyard.app, and on a Mac a .dmg with it, signed and notarised where there is an identity.

Written for a public host's Mac; none was at hand to try it.
"""

from __future__ import annotations

import os
import platform
import plistlib
import shutil
import tempfile
from pathlib import Path

from packages.bundle import Bundle
from packages.project import CHECKOUT, FILES, run

IDENTITY, PROFILE = "SWITCHYARD_SIGNING_IDENTITY", "SWITCHYARD_NOTARY_PROFILE"
"""Of the environment: the name of a certificate in the keychain, and of a notarytool profile there."""


def build_app(bundle: Bundle, target: Path) -> Path:
    """`Switchyard.app`, in `target`: the program's folder with what Finder reads."""
    app = target / "Switchyard.app"
    shutil.rmtree(app, ignore_errors=True)
    contents = app / "Contents"
    (contents / "MacOS").mkdir(parents=True)
    shutil.copytree(bundle.root, contents / "Resources", symlinks=True)
    launcher = contents / "MacOS" / "Switchyard"
    shutil.copy2(FILES / "switchyard-macos.sh", launcher)
    launcher.chmod(0o755)
    (contents / "Info.plist").write_bytes(plistlib.dumps(information(bundle.project.version)))
    shutil.copy2(FILES / "uninstall.py", contents / "Resources" / "uninstall.py")
    if platform.system() == "Darwin":
        _icons(contents / "Resources" / "switchyard.icns")
    return app


def information(version: str) -> dict[str, object]:
    """Info.plist."""
    return {
        "CFBundleName": "Switchyard",
        "CFBundleDisplayName": "Switchyard",
        "CFBundleIdentifier": "io.switchyard.Switchyard",
        "CFBundleExecutable": "Switchyard",
        "CFBundleIconFile": "switchyard",
        "CFBundlePackageType": "APPL",
        "CFBundleShortVersionString": version,
        "CFBundleVersion": version,
        "LSMinimumSystemVersion": "14.0",
        "LSArchitecturePriority": ["arm64"],
        "NSHighResolutionCapable": True,
        "NSHumanReadableCopyright": "The Switchyard developers, Apache-2.0",
        "CFBundleDocumentTypes": [
            {
                "CFBundleTypeName": "Language model (GGUF)",
                "CFBundleTypeExtensions": ["gguf"],
                "CFBundleTypeRole": "Viewer",
                "LSHandlerRank": "Default",
            },
            {
                "CFBundleTypeName": "Rows of prompts",
                "CFBundleTypeExtensions": ["csv", "jsonl", "parquet", "xlsx"],
                "CFBundleTypeRole": "Viewer",
                "LSHandlerRank": "Alternate",
            },
        ],
    }


def build_dmg(app: Path, version: str, target: Path) -> Path:
    """The disk image, on a Mac.

    Raises:
        PackagingError: a tool failed, or this is no Mac.
    """
    image = target / f"Switchyard-{version}-arm64.dmg"
    identity, profile = os.environ.get(IDENTITY), os.environ.get(PROFILE)
    if identity:
        _sign(app, identity)
    with tempfile.TemporaryDirectory(prefix="switchyard-dmg-") as name:
        shutil.copytree(app, Path(name) / app.name, symlinks=True)
        (Path(name) / "Applications").symlink_to("/Applications")
        create: list[str | Path] = ["-quiet", "-ov", "-format", "ULMO", "-volname", "Switchyard", "-srcfolder", name]
        run(["hdiutil", "create", *create, image], "The disk image could not be made")
    if identity and profile:
        run(["codesign", "--sign", identity, image], "The disk image could not be signed")
        run(
            ["xcrun", "notarytool", "submit", image, "--keychain-profile", profile, "--wait"], "Apple refused the image"
        )
        run(["xcrun", "stapler", "staple", image], "The image's ticket could not be attached")
    return image


def _sign(app: Path, identity: str) -> None:
    """From the inside out, as Apple asks; the hardened runtime with what Python and torch need."""
    entitlements = FILES / "entitlements.plist"
    options: list[str | Path] = [
        "--force",
        "--timestamp",
        "--options",
        "runtime",
        "--entitlements",
        entitlements,
        "--sign",
        identity,
    ]
    inside = [path for path in app.rglob("*") if path.suffix in (".so", ".dylib") or path.parent.name == "bin"]
    for path in sorted(inside, key=lambda each: -len(each.parts)):
        if path.is_file() and not path.is_symlink():
            run(["codesign", *options, path], f"{path.name} could not be signed")
    run(["codesign", *options, app], "Switchyard.app could not be signed")


def _icons(target: Path) -> None:
    from packages.windows import icon

    with tempfile.TemporaryDirectory(prefix="switchyard-icons-") as name:
        picture, pictures = Path(name) / "logo.ico", Path(name) / "logo.iconset"
        picture.write_bytes(icon(CHECKOUT / "resources" / "icons" / "logo.svg"))
        pictures.mkdir()
        for size in (16, 32, 128, 256):
            made = pictures / f"icon_{size}x{size}.png"
            run(["sips", "-s", "format", "png", "-z", str(size), str(size), picture, "--out", made], "No icon")
        run(["iconutil", "--convert", "icns", "--output", target, pictures], "No icon")
