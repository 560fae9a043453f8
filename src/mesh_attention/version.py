"""The version, and the torch that it is tested with; the build reads it without importing."""

__version__ = "1.0.0rc1"

# CI runs each minor version from the first to the second (tests/package/test_ci_file.py).
OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)
TESTED_TORCH = "torch {}.{} to {}.{}".format(*OLDEST_TORCH, *NEWEST_TORCH)
