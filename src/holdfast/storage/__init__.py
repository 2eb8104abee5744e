"""Storage backends: one contract, and one module or package for each kind of storage."""
