"""`python -m engine.kernels.native`: builds the kernels, tests them on this machine, and reports the result.

With `--status` nothing is built; prints the status as JSON: `isa` (a name, or null) and `note` (why there is none).
"""

import json
import sys

from engine.kernels.native.build import BuildError, build
from engine.kernels.native.library import missing_note, prove, usable_isa


def main(arguments: list[str]) -> int:
    """0 if the kernels can be used here, 1 if PyTorch's operators are used instead."""
    if arguments == ["--status"]:
        isa = usable_isa()
        sys.stdout.write(json.dumps({"isa": isa.name if isa else None, "note": "" if isa else missing_note()}))
        return 0
    try:
        path = build()
    except BuildError as failure:
        sys.stderr.write(f"The native kernels were not built: {failure}. PyTorch's operators are used instead.\n")
        return 1
    isa = prove(path)
    sys.stderr.write(f"Native kernels: {isa.name if isa else 'none works on this machine'}.\n")
    return 0 if isa else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
