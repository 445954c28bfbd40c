"""Optimize: a training config rewritten for a GPU and its host, a few values at a time, everything else as it stands.

``document`` changes single values in the text of a YAML file, ``names`` knows what settings are called in people's
configs, ``rules`` says what to change and why. Nothing here imports torch.
"""
