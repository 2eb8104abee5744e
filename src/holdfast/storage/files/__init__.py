"""The backend that keeps a store in a folder of readable files."""
