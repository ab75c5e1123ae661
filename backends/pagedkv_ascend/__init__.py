"""The Ascend backend: attention by torch-npu's fused operators over paged caches."""
