"""The worker's side of its site's keeper: what is kept there, and how it travels.

`places` says which paths there are and whose they are, `pieces` how a file becomes checksummed
chunks and a file again; both are used by `dlion_worker.keeper`, too. `client` makes the calls,
`courier` makes them in a thread of its own. Called by `dlion_worker.trainer.saving`.

What stays out: what is in the files, and when one is due.
"""

from dlion_worker.keeping.client import KeeperClient
from dlion_worker.keeping.courier import Courier

__all__ = ["Courier", "KeeperClient"]
