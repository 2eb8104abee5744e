"""Values and bytes: exact encoding, sealed rows, and finding what changed between two states."""
