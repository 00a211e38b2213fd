"""Traces: the columns of a run, reading and writing, importers, and the synthetic generator."""
