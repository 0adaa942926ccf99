"""The one room that knows torch: load, adapters, step, optimizer, and the trace that runs them without data.

Imported only when something is executed or traced, through `foretune.api`.
"""
