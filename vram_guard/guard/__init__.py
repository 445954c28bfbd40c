"""The guard around a training, framework-free: adapters read their framework's objects, and apply what is decided."""
