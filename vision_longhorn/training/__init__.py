"""How models are trained: settings, the trainer and what it keeps."""
