"""Simulates whole jobs in virtual time, with real policies and gradients but no sockets.

Contains the clock, the network model, the cost model, the simulated worker, worker churn and the
run. Policies, batching, budgets and measurement are the same objects that trainer and sidecar use.
"""
