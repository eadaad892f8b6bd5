"""Everything that imports transformers, accelerate, peft or trl."""
