"""Suite `models`: whole models, forward and training step."""
