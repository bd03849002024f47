"""multibn in training frameworks: one file for each, which imports it; nothing imports these."""
