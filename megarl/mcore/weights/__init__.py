"""Weights and training states in files: Hugging Face's form, Megatron's, and between the two."""
