"""The only writers of children and events; the patch of a status."""
