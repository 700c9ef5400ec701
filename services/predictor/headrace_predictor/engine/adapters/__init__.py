"""LoRA adapters: their files, and their part of a product. What a model's layers do with them is in runners/."""
