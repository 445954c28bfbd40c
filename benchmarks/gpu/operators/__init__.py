"""Training steps of one operator each: every request of it, as measured on a GPU and as predicted without one."""
