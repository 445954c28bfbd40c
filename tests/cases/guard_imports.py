"""What a guard imports once it plans: processes of tests begin with it, and their copies need not import it each."""

PLANS = ("vram_guard.simulate.tracing.run", "vram_guard.plan._of_source", "vram_guard.plan._few_blocks")
