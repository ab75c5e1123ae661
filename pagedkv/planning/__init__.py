"""What a model needs and what fits, before a weight is read: the engine's arithmetic, for this device or another."""
