"""Hydra configuration of the command line: one folder per choice (policy, profile, trace, cluster, platform)."""
