"""Importable stand-ins that let a stock SGLang start where there is no CUDA.

This folder goes on PYTHONPATH of the server process, and only where torch finds no CUDA device. It holds

- `triton`, `torchvision`, `sgl_kernel`: names that SGLang imports at load time and has no CPU build of;
- `megarl_cpu_plugin.py` and its `.dist-info`: a plugin through SGLang's own entry point group
  `sglang.srt.plugins`, with attention for a whole batch in one call and cheap
  sampling (`megarl_kernels.py`).

SGLang itself is untouched. Nothing in here imports megarl.
"""
