"""What single operators allocate on CUDA: kernels, autocast, composite operators, shapes."""
