"""From the program that a method wrote to the program that a machine runs, step by step.

A pass is a pure function from program to program, for a `Target`. What comes out is what `verify`
proves, `count` counts, `simulate` times, `draw` draws and the executor runs.
"""
