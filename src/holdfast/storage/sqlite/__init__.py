"""The backend that keeps a store in one SQLite file."""
