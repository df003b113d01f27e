"""What torch and its libraries read from the environment when they are loaded; call it before that."""

import os


def set_memory_defaults() -> None:
    """Settings that keep memory small where the user has not chosen otherwise."""
    # CUDA: segments that grow, instead of many of fixed sizes; lengths that vary then fragment less.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # CPU in bf16: oneDNN compiles a kernel for every shape and keeps 1024 of them, which for attention
    # over a growing number of tokens came to 400 MB within three steps; with 128 it was no slower.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
