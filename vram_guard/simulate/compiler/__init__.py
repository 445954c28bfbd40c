"""compiler: torch.compile followed without a GPU and without Triton; only the kernels are left out.

Dynamo, AOTAutograd, the partitioner and Inductor are torch's own. They see CUDA tensors; the Python code that Inductor
writes then runs in the trace, where what it allocates and frees is recorded.
"""
