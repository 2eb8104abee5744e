"""Importers of checkpoints that other stores keep."""
