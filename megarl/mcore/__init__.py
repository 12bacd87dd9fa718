"""Megatron-Core: models, weights, log-probs, the train step. Importing it prepares Megatron for the machine's device."""

from megarl.mcore.device import install

install()
