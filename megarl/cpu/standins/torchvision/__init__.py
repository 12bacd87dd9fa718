"""Stand-in for torchvision, whose wheel needs CUDA: SGLang and transformers name it while they load."""

from megarl_placeholder import get_placeholder, open_package

__version__ = "0.0.0"


def __getattr__(name):
    return get_placeholder("torchvision", name)


open_package("torchvision")
