"""Draft trees: growth, shape, acceptance. Tensors and rules only; knows no model."""
