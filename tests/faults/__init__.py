"""Fault tests: what `save` acknowledged is never lost and never silently wrong.

Every harness here runs a real writer that says what it is about to do and what was acknowledged (a
`Ledger`), breaks something under it, and then compares what the store still answers with what the
ledger promises. Each has mutants, deliberately broken writers or engines that it must catch.
"""
