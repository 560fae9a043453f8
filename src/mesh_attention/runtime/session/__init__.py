"""Calls on a process group: plans made ready once, and run many times."""
