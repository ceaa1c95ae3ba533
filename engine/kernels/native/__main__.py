"""`python -m engine.kernels.native`: builds the kernels, tests them on this machine, and reports the result.

With `--status` nothing is built; prints the status as JSON: `isa` (a name, or null), `note` (why there is none) and
`faster` (pairs of a kind of work and the name of what was measured to be faster at it, or null before that).
"""

import json
import sys

from engine.hardware.cpu import compute_threads
from engine.kernels.native.build import BuildError, build
from engine.kernels.native.choice import choice_for, ensure_measured
from engine.kernels.native.library import is_forced, load_kernels, missing_note, prove, usable_isas


def main(arguments: list[str]) -> int:
    """0 if the kernels can be used here, 1 if PyTorch's operators are used instead."""
    if arguments == ["--status"]:
        isas = usable_isas()
        choice = None if is_forced() else choice_for(compute_threads())
        faster = None if choice is None else [[str(use), isa.name] for use, isa in choice.items()]
        document = {"isa": isas[-1].name if isas else None, "note": "" if isas else missing_note(), "faster": faster}
        sys.stdout.write(json.dumps(document))
        return 0
    try:
        path = build()
    except BuildError as failure:
        sys.stderr.write(f"The native kernels were not built: {failure}. PyTorch's operators are used instead.\n")
        return 1
    isa = prove(path)
    sys.stderr.write(f"Native kernels: {isa.name if isa else 'none works on this machine'}.\n")
    if (kernels := load_kernels(compute_threads())) is not None:
        ensure_measured(kernels)
        kernels.close()
    return 0 if isa else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
