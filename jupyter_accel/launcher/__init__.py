"""Starts, watches and ends the processes of a job; knows neither PyTorch nor Jupyter."""
