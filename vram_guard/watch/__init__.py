"""Watch: what training really takes, beside what was predicted; and going on when memory runs out after all."""
