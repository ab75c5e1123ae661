"""The Triton kernels of the CUDA backend, as plain functions over torch tensors.

    append(k, v, cache, slots)                                        append.py
    attend(q, out, cache, layer, rows, scratch, lse=None)             attention.py
        scratch_floats(q_heads, v_dim, rows, decode_q=1)              floats of `scratch` that are always enough
    rms_norm(x, weight, eps), add_rms_norm(x, residual, weight, eps)  ops.py, all with the meaning of `pagedkv.ops`
    rope(q, k, cos, sin), silu_mul(x), gelu_tanh_mul(x)
    greedy(logits), sample(logits, numbers, temperature, top_k, top_p)   sampling.py

`attend` also takes `target` (80, 86, ... 120), the compute capability to choose tiles for; None asks the device of q.
Records of their arguments: arguments.py. Modules named jit_* hold kernels and nothing else; everything
else here runs on the host. A launcher enqueues on the current stream and never waits, and allocates only what it
returns.
"""
