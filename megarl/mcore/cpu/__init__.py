"""What lets Megatron run without CUDA; none of it is active where CUDA is present."""
