"""Keeps a machine's temperature below a threshold by limiting the worker's share of compute.

`thermal_model` learns how the machine warms up, `heat_controller` chooses the share ahead of the
threshold, `duty_cycle` turns a share into rests between steps. The sidecar and the simulator drive
them; time and temperature are arguments.
"""
