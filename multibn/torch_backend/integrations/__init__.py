"""multibn in training frameworks. Only a user imports these files, and each its framework."""
