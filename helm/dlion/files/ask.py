"""Asks the operator for its readiness and its metrics; run by the pod of `helm test`."""

import sys
import time
import urllib.request

DEADLINE_S = time.monotonic() + 60


def answer(url):
    """The body of a 200. Raises: OSError where there is none within a minute."""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return response.read().decode()
        except OSError as error:  # HTTP errors too: not ready yet
            if time.monotonic() > DEADLINE_S:
                raise
            print(f"{url}: {error}", flush=True)
            time.sleep(1)


ready, metrics = (answer(url) for url in sys.argv[1:])
if "dlion_operator_" not in metrics:
    sys.exit(f"{sys.argv[2]} exposes no dlion_operator_ metric")
print("the operator is ready and exposes its metrics")
