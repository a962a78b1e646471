"""The trainer process: joins training, policies and exchange into one loop.

What goes in: the order of things within one worker, from start to averaged model. What stays out:
arithmetic of a policy (`policies`), TensorFlow (`training`), frames (`exchange`), measuring
(`sidecar`). Started by the supervisor as `python -m dlion_worker.trainer --config FILE`.
"""
