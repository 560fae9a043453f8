"""A whole training step, planned: what fits, how long it takes, and what to switch on."""
