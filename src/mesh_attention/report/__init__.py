"""One page about a problem on a cluster. `facts.py`, with what it asks, finds out what is shown and
knows nothing of pictures; `page.py` shows it, with pictures made from facts and nothing else."""
