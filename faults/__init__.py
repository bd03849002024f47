"""Fault injection for distributed training: `python -m faults`."""
