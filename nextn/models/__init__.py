"""The DeepSeek-V3 target, its NextN layer and their weights."""
