"""`make bundle`: one file with everything for an installation without network."""
