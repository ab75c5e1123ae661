"""The backend for NVIDIA GPUs. Not yet run on one: see README and `pagedkv doctor` for what was tested in its place."""
