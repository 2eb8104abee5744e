"""Agents' frameworks on holdfast: one module for each, which alone imports its framework."""
