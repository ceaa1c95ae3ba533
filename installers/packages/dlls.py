"""Whether folders for Windows are complete, told without Windows: every library that a file imports is in them.

Windows looks for a module's imports beside the module, in folders that packages name when they are imported, beside
python.exe, and in the system's folder.
"""

from __future__ import annotations

import re
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

_OF_WINDOWS = re.compile(
    r"(api-ms-win-|ext-ms-).*|(advapi32|authz|avrt|bcrypt|bcryptprimitives|cfgmgr32|combase|comctl32|comdlg32|crypt32|d2d1|d3d9"
    r"|d3d11|d3d12|d3dcompiler_47|dbghelp|dcomp|dnsapi|dsound|dwmapi|dwrite|dxgi|dxva2|evr|gdi32|gdiplus|hid|imm32"
    r"|icu|icuin|icuuc|imagehlp|iphlpapi|kernel32|kernelbase|mf|mfplat|mfreadwrite|mpr|mscms|msimg32|msvcrt|msvfw32|ncrypt|netapi32|normaliz|ntdll"
    r"|odbc32|ole32|oleacc|oleaut32|opengl32|pdh|powrprof|propsys|psapi|rpcrt4|rstrtmgr|secur32|setupapi|shcore|shell32"
    r"|shlwapi|synchronization|ucrtbase|uiautomationcore|urlmon|user32|userenv|webservices|usp10|uxtheme|version|wevtapi|winhttp"
    r"|wininet|winmm|winscard|winspool|wintrust|winusb|wlanapi|ws2_32|wsock32|wtsapi32|xinput9_1_0)\.(dll|drv)",
    re.IGNORECASE,
)
"""Of Windows 10, as far as our libraries use them."""
_BINARIES = (".dll", ".pyd", ".exe")


def missing_libraries(*folders: Path) -> dict[str, set[str]]:
    """Libraries that nobody brings -> the files that import them, relative.

    Args:
        folders: that one process looks into.
    """
    files = [(path, folder) for folder in folders for path in folder.rglob("*") if path.suffix.lower() in _BINARIES]
    there = {path.name.lower() for path, _ in files}
    missing: dict[str, set[str]] = {}
    for path, folder in files:
        for name in imports(path):
            if name not in there and not _OF_WINDOWS.fullmatch(name):
                missing.setdefault(name, set()).add(path.relative_to(folder).as_posix())
    return missing


def missing_for_wheels(wheels: Iterable[Path], python: Path) -> dict[str, set[str]]:
    """The same of wheels that are unpacked for the Python in a folder."""
    with tempfile.TemporaryDirectory(prefix="switchyard-dlls-") as name:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as zipped:
                zipped.extractall(name, [each for each in zipped.namelist() if each.lower().endswith(_BINARIES)])
        return missing_libraries(Path(name), python)


def imports(file: Path) -> set[str]:
    """Names of the libraries that a program or library imports, in lower case; none of what is for other systems."""
    import pefile

    # Delayed ones are looked for when they are used, and may be missing: cards' drivers, for example.
    parts = [pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_IMPORT"]]
    try:
        with pefile.PE(str(file), fast_load=True) as binary:
            binary.parse_data_directories(directories=parts)
            return {entry.dll.decode("ascii").lower() for entry in getattr(binary, "DIRECTORY_ENTRY_IMPORT", ())}
    except pefile.PEFormatError:
        return set()


def exports(file: Path) -> set[str]:
    """Names of the functions that a library offers."""
    import pefile

    with pefile.PE(str(file), fast_load=True) as binary:
        binary.parse_data_directories(directories=[pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_EXPORT"]])
        table = getattr(binary, "DIRECTORY_ENTRY_EXPORT", None)
        return {symbol.name.decode("ascii") for symbol in table.symbols if symbol.name} if table else set()
