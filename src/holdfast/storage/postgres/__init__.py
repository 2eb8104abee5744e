"""The backend that keeps a store in PostgreSQL."""
