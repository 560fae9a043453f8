"""One batch on ranks held against one process, and in words what is most likely wrong."""
