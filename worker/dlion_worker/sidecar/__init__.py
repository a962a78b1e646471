"""The sidecar: measures what a worker can do, and sets its batch size and link budgets.

Estimators and the controller are pure (time is an argument). Around them are a Unix socket to the
trainer, gRPC to other sidecars and Prometheus metrics.

Started as `python -m dlion_worker.sidecar --config FILE` beside each trainer; nothing else imports
it. It must stay small (80 MB, 2 % of a core): no TensorFlow here.
"""
