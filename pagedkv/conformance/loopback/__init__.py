"""The reference backend of the contract: everything declared and done, slowly and exactly, on purpose as late as legal.

Chosen by name only. Its memory is its own and full of NaN at first; appends, refreshes and copies run when somebody
has a right to their results, and not before. A core that leaves out a wait, reuses an array too soon or reads what was
never written gets NaN or old bytes, here and at once.
"""
