"""Whole jobs in virtual time: real policies and real gradients, no sockets and no waiting.

What goes in: a virtual clock (`clock`), links that share rates (`network`, `links`), what a step
takes (`costs`, `pace`; measured by `calibration` with `steps`), one worker driven as the trainer
drives it (`worker`), which links are up (`connections`), who comes and goes (`roster`,
`introduction`, `entrance`), the run and its end (`run`, `ending`), and what a recorded run had
(`recorded`).
What stays out: policies, batching, budgets and measuring, which are the very objects that trainer
and sidecar use.
"""
