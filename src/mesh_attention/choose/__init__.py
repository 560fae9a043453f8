"""Which method and setting a plan has: the search over all of them, and its choice in words."""
