"""The keeper: the one process of a site and run that has a disk of its own.

What goes in: the files that the site's workers bring (`service`, `store`), the run's records as
the coordinator streams them (`following`) and the result folder that they make (`recorder`), the
keeper's certificate (`certificate`). What stays out: what is in a checkpoint or a model, and
TensorFlow.
Started by `python -m dlion_worker.pod keeper`. See docs/keeper.md.
"""
