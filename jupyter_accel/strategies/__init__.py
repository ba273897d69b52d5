"""Ways to distribute a model: one file each, found by name through ``registry``."""
