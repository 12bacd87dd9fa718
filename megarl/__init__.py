"""megarl: reinforcement learning of large language models on Megatron-Core, SGLang and Ray."""
