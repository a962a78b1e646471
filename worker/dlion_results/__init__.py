"""The results of a run: the folder, its figures and the report page.

`folder` writes during the run and `events` reads its records. `tally` aggregates records in bounded
memory, `summary` turns that into `summary.json`, and `report` draws the page. Nothing here trains,
evaluates or needs TensorFlow. Terminal output belongs to the command line.
"""
