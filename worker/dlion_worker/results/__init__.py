"""What a run leaves behind: the folder, its figures and the page that shows them.

`folder` writes while the run goes on, `events` reads it again, `tally` adds records up in bounded
memory, `summary` turns the tally into `summary.json`, `faults` judges a fault by its events and
`report` draws the page. Whoever starts a run (`dlion run`) and `dlion report` call it.

What stays out: training, evaluation, and anything that needs TensorFlow; what is shown in a
terminal belongs to the command line.
"""
