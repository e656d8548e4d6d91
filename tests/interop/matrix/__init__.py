"""The parts of `run` and `sticky`."""
