"""LoRA adapters: structure, files, targets, merging."""
