"""Training of drafter heads on text that the target writes itself."""
