"""The matrix, folder, runs and table of dlion compare."""
