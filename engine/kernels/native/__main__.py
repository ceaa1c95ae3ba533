"""`python -m engine.kernels.native`: build the kernels, prove them on this machine, and say what came of it."""

import sys

from engine.kernels.native.build import BuildError, build
from engine.kernels.native.library import prove


def main() -> int:
    """0 if the kernels can be used here, 1 if PyTorch's operators have to do."""
    try:
        path = build()
    except BuildError as failure:
        sys.stderr.write(f"The native kernels were not built: {failure}. PyTorch's operators are used instead.\n")
        return 1
    isa = prove(path)
    sys.stderr.write(f"Native kernels: {isa.name if isa else 'none works on this machine'}.\n")
    return 0 if isa else 1


if __name__ == "__main__":
    raise SystemExit(main())
