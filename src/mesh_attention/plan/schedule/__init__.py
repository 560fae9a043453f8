"""Schedulers: pure functions from a task graph with costs to an order of tasks.

`greedy` is the paper's planner, `search` looks for a faster order, `greedy_capped` keeps to a
memory cap. All return a `Schedule`, which `check_schedule` verifies and makespans time.
"""
