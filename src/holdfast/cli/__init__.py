"""The command line: `holdfast`.

One module per family of commands, each imported only when one of its commands is called.
"""
