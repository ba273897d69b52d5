"""What travels between a kernel and its ranks: found, taken apart, sent, and put together."""
