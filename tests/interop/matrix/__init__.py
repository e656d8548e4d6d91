"""What `run` and `sticky` share."""
