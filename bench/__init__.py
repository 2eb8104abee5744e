"""Measure the cost of holdfast, next to raw SQLite and LangGraph's SQLite saver.

Run ``python -m bench``. The two sides of a ratio are measured in the same run, in turn.
"""
