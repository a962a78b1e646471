"""The keeper: the one process per site and run that has a persistent disk.

It stores the workers' files and writes the run's records, which the coordinator streams, to the
result folder. It neither reads checkpoints or models nor imports TensorFlow.
Started by `python -m dlion_worker.pod keeper`. See docs/keeper.md.
"""
