"""What runs once per site: the coordinator, and its certificate authority.

What goes in: everything that serves a site's workers. What stays out: anything a worker does. The
local runner serves the same coordinator inside `dlion run`.
"""
