"""Pictures of a plan as text, all read from its programs: who computes what, in which steps.

Every function here is pure and returns a string or plain data; nothing is coloured and nothing is
printed, so the same text serves terminals, golden files and reports.
"""
