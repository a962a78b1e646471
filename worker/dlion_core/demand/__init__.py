"""Predicts what other work takes from a worker's processors, and the worker's speed from it.

`demand_meter` reads what others take, `forecaster` continues it, `demand_predictor` compares the
forecast with the measured speed and decides which of the two counts. The sidecar and the simulator
drive them; time and counters are arguments.
"""
