"""The Megatron model of a Hugging Face checkpoint: architecture, layers, heads."""
