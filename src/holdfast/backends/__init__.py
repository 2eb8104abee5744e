"""Where bytes are kept: one small contract (`base`), one module per kind of storage."""
