"""The stored format: exact encoding of values, sealed rows, and the changes between two states.

Nothing in this package knows how or where the rows are stored.
"""
