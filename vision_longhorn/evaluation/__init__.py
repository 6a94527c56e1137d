"""How models are evaluated, and what is written down about it."""
