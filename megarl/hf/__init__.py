"""Hugging Face checkpoints: found on this machine, or made here from nothing that is downloaded."""
