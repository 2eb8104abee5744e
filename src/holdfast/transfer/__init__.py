"""Copies of sessions to other stores, and exports to files."""
