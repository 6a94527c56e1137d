"""What a study is made of: its plan, its runs, its results, and what they say."""
