"""``vram-guard launch``: arguments, accelerate's own launchers, and the target that they describe."""
