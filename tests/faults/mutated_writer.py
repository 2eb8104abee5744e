"""The writer of the power-loss harness, without one of the engine's guards.

`python -m …mutated_writer MUTANT FOLDER LEDGER SCRIPT [backend] [durability]`.
"""

import sys

from tests.mutants import named

from .writer import main

if __name__ == "__main__":
    named(sys.argv[1])()
    main(*sys.argv[2:])
