"""A process that runs one download and says how it ended, for tests that kill it.

    python -m tests.download_child KEY PART_BYTES FULL_AFTER

FULL_AFTER: the disk is full once so many bytes are written; 0: never.
"""

import errno
import json
import os
import sys
from typing import Any

from engine.checkpoint.downloads import parts, queue, source, transfer
from engine.checkpoint.downloads.parts import Waits


def main() -> None:
    key, part_bytes, full_after = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    parts.PART_BYTES = part_bytes
    Waits.FIRST_S, Waits.LONGEST_S = 0.02, 0.2
    source.STALL_S = 1.0
    transfer._NOTE_S, transfer._NOTE_BYTES = 0.1, part_bytes // 4
    write, written = transfer._write, 0

    def until_full(out: Any, data: Any) -> None:
        nonlocal written
        written += len(data)
        if written > full_after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(out, data)

    if full_after:
        transfer._write = until_full
    ended = queue.run(key)
    sys.stdout.write(json.dumps({"state": ended.state, "error_code": ended.error_code, "problem": ended.problem}))


if __name__ == "__main__":
    main()
