"""What every request over HTTP shares.  The client is httpx2 everywhere, which huggingface_hub asks with, too.

Proxies and certificates are the system's, as that library reads them.
"""

from __future__ import annotations

import functools
import logging
import ssl

HEADERS = {"Accept-Encoding": "identity", "User-Agent": "switchyard"}
"""No compression: it could unpack to more than any limit, and would hold back what is there."""

for _noisy in ("httpx2", "httpcore2"):
    logging.getLogger(_noisy).setLevel(logging.WARNING)  # they would log whole addresses, and signed ones are keys


@functools.cache
def system_trust() -> ssl.SSLContext:
    """What the system trusts; reading it takes a tenth of a second."""
    import httpx2

    return httpx2.create_ssl_context()
