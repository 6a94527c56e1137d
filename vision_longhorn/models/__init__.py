"""The models, and what they are made of."""
