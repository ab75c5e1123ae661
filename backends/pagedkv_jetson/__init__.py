"""pagedkv's backend for NVIDIA Jetson boards: the CUDA backend over memory that processor and GPU share."""
