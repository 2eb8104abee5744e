"""Importers of conversations that other tools recorded."""
