"""Retention, garbage collection, verification, repair and statistics of a store."""
