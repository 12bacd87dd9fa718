"""Families of models, one file each: what they are called, how they are read, and every tensor of their layers."""
