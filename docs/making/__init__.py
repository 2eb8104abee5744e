"""Generates the parts of the documentation that show the project itself, so that they stay true.

`python -m docs.making` writes the picture of the log, the table of measurements in the README, the
commands and exit codes in docs/cli.md, and web/openapi.json. A test fails if one is out of date.
"""
