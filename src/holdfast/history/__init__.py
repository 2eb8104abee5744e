"""The history of a session: read, name, compare, search, write and undo its checkpoints."""
