"""One worker's part in a run: joining, steps, waiting, pausing and stopping.

The trainer and the simulator pass events in and execute the instructions that come out.
"""
