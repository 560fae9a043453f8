"""Which method and setting: the search over all of them, and what it says of its choice."""
