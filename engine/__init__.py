"""The engine.  It knows no window."""

import os
import sys

if sys.platform == "darwin":  # torch looks when it is imported: what Apple's graphics cannot compute, the CPU does
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
