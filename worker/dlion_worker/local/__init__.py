"""What stands between `dlion run` and the machine: starts the processes, imposes the environment.

What goes in: starting and ending a run's processes, network namespaces, relays, quotas. What stays
out: anything that a worker in a cluster would need too.
"""
