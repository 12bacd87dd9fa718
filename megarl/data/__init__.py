"""Prompt sources, the resumable sampler, and packing into micro-batches."""
