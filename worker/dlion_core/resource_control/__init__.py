"""Batch sizes and link budgets from measured compute capacity and bandwidth.

`resource_controller` combines the estimators: `capacity` and `sample_cost` (compute), `rates`
(links). `batching` and `goodput` choose batch sizes, `budgets` the bytes per link and iteration.
The sidecar and the simulator drive it; time is an argument.
"""
