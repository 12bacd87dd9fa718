"""Megatron-Core: models, weights, log-probs, the train step. Without CUDA it is rewritten as it loads."""

from megarl.cpu.megatron import install

install()
