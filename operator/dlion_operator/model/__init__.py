"""Settings of the operator, and views of objects that every other package reads."""
