"""Makes what the documentation shows of the project itself, so that it stays true.

`python -m docs.making` writes the picture, the table of measurements in the README, and what
docs/cli.md says of commands and exit codes. The tests fail where one of them is out of date.
"""
