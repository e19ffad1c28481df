"""Pictures of plans, checkpoints and rewrites, as SVG."""
