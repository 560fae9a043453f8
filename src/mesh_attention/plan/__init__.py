"""Planning: pure functions from a problem to a plan, with no torch anywhere below here.

A method writes a `Plan`; `verify`, `count`, `draw`, the simulator and the executor read it.
Standard library and numpy only, so a laptop can plan for 4,096 GPUs.
"""
