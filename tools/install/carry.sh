#!/usr/bin/env bash
# For a GPU machine without internet that has torch: tools/install/carry.sh FOLDER [PYTHON]     (PYTHON: 3.12)
# Downloads the wheels that check_gpu.py --only float32,bfloat16,update and tests/gpu need besides torch, versions as in
# cpu.lock, about 45 MiB. There: for wheel in FOLDER/*.whl; do python3 -m zipfile -e $wheel there/; done, then
# PYTHONPATH=there:. before the command. None of them needs Ray, SGLang or Transformer Engine.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$1 version=${2:-3.12} pip="$here/../../.venv/bin/python -m pip"
names="megatron-core omegaconf hydra-core einops numpy packaging pyyaml rich markdown-it-py mdurl pygments safetensors tqdm
  transformers tokenizers huggingface-hub regex httpx httpcore h11 anyio certifi idna filelock fsspec hf-xet typer
  psutil pytest pluggy iniconfig pytest-timeout pytest-xdist execnet"
pinned=$(for name in $names; do grep -m1 "^$name==" "$here/cpu.lock" | cut -d' ' -f1; done)
# Only this one has no wheel on the index.
$pip wheel --quiet --no-deps --wheel-dir "$folder" "$(grep -m1 "^antlr4-python3-runtime==" "$here/cpu.lock" | cut -d' ' -f1)"
$pip download --quiet --no-deps --dest "$folder" --only-binary=:all: --python-version "$version" \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 $pinned
du -sh "$folder"
