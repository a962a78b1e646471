"""Costs of the simulator's model, from timed steps and from recorded runs."""
