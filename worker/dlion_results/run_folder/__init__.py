"""The folder of a run: its files, lock, records, models and checks before a resume."""
