"""All that exists because there is no CUDA: Megatron-Core's names, layers, SGLang's stand-ins, threads, dtypes."""
