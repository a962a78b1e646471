"""The trainer process: one worker from start to averaged model.

Owns the order of events. Policy arithmetic is in `policies`, TensorFlow in `training`, frames in
`exchange`, measurement in `sidecar`. The supervisor starts `python -m dlion_worker.trainer --config
FILE`.
"""
