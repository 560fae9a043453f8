"""The language of plans: buffers, operations, programs, and what follows from them alone."""
