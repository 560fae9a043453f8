"""One Triton kernel for each piece of work on rows; imported only where Triton is: `rows.py`."""
