# The guard, for any config that has this file in its _base_ list (or imports it inside read_base()).
# It predicts the memory of a training step before anything is built, and makes the smallest change that fits.
runner_type = "vram_guard_mmengine.GuardRunner"
vram_guard = dict(
    # budget="24GiB",       # what PyTorch may reserve; with neither budget nor gpu: what is free on the GPU here
    # gpu="RTX 4090",       # a whole card by name
    # mode="fit",           # "report": only say; "strict": stop where the training does not fit as written
    # grow=True,            # fill what is left with a larger batch, and scale the learning rate with it
)
