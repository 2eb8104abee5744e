"""The command line: `holdfast`.

`main.COMMANDS` lists all commands. The command NAME is the function NAME_ in a module cmd_*.py,
which is imported when the command is called.
"""
