"""Running plans: one executor that interprets programs, and the transports below it.

Nothing here knows methods, tiles or schedules: programs say all of it.
"""
