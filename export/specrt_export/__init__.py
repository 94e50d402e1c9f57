"""Build time: checkpoints become artifacts."""
