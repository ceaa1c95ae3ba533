"""HTTP with servers of this machine, without certificates: their list takes longer to read than most answers do."""

from functools import partial

import httpx2

get, post, stream = (partial(each, verify=False) for each in (httpx2.get, httpx2.post, httpx2.stream))
