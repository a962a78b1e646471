"""The only writers of children, status and events."""
