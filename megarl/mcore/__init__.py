"""Megatron-Core: models, weights, log-probs, the train step. Importing it installs the device hook."""

from megarl.mcore.device import install

install()
