"""What `run` and `sticky` are made of."""
