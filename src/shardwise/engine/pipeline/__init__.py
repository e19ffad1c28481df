"""Pipeline parallelism on unmodified models: modules run on their stage, everywhere else only shapes are known."""
