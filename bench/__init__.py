"""Measures what holdfast costs, beside raw SQLite and beside LangGraph's SQLite saver.

Run ``python -m bench``; every ratio is taken within one run, both sides in turn.
"""
