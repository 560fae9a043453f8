"""One Triton kernel for each piece of work on rows; imported only where Triton is (see `rows.py`)."""
