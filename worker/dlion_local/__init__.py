"""Runs a job on this machine for `dlion run`: starts processes and emulates the environment.

Contains process control, network namespaces, relays and CPU quotas. Code that workers in a cluster
need too does not belong here.
"""
