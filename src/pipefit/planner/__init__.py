"""Search over plans: which cut, schedule, widths and micro-batch size, and why every other lost."""
