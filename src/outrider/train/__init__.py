"""Train draft heads: the target generates answers, and heads learn to predict its tokens."""
