"""What goes wrong in distributed training, done on purpose: `python -m faults`."""
