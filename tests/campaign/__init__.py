"""The campaign of faults: `python -m tests.campaign` runs it whole and reports what was lost, which has to be nothing.

Each module beside this one is a class of faults with one function `run(scale, seed) -> Outcome`.
"""
