"""Schedulers: pure functions from a task graph with costs to an order of tasks.

`greedy` is the paper's planner, `greedy_capped` keeps to a memory cap.
"""
