"""The sidecar: what a worker can do, measured, and told to its trainer and its peers.

What goes in: estimators and the director (pure: time is an argument), node facts, and the thin
skins around them (Unix socket, gRPC between sidecars, Prometheus). What stays out: the gradient
exchange itself, and which entries of a gradient are sent (`dlion_worker.policies`).

Started as `python -m dlion_worker.sidecar --config FILE` beside each trainer; nothing else imports
it. It must stay small (80 MB, 2 % of a core): no TensorFlow here.
"""
