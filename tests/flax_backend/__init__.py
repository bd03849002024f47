NUM_DEVICES = 4  # of the process that runs the files devices_*.py
