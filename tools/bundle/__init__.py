"""`make bundle`: all that an installation without network needs, in one file."""
