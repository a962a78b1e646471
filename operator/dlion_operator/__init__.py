"""What runs once per site: the coordinator, and its certificate authority.

What goes in: everything that serves a site's workers. What stays out: anything a worker does. The
local runner serves the same coordinator inside `dlion run`.
"""

import os

# Read when gRPC is first used. A caller whose idle connection its server closes is no error, but
# gRPC prints a line for it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
