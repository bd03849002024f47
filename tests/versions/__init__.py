"""The tests with one set of versions, and the table of all sets: see noxfile.py.

pytest collects nothing here.
"""
