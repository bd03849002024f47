"""`multibn check`: numbers and times of ranks that the user's own launcher has started."""
